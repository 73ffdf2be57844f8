"""Faults of the inputs of a job: its RayCluster, its manifest, the space on its volume, its image, its data."""

import tempfile
import time
from pathlib import Path

import numpy as np
from streaming.base.format.mds import MDSWriter

from spotune_testcluster.waiting import wait_for
from spotune_trainer.data.schedule import SampleSchedule
from spotune_trainer.data.shards import ShardedDataset
from tests.cluster.faults.harness import FaultHarness
from tests.trainer.support.tiny import VOCABULARY

WRONG_IMAGE = "testcluster.local/none:1"
SMALL_VOLUME = "400Mi"
GROWN_VOLUME = "800Mi"
BROKEN_STEP = 1
FAILURE_LIMIT = 2
APPLIES = 30
_SECONDS_BETWEEN_APPLIES = 10.0


def ray_cluster_deleted(harness: FaultHarness) -> None:
    with harness.expect_recovery("headLost", lost_workers=harness.job.workers):
        harness.job.kubectl("delete", "raycluster", f"spotune-{harness.job.name}", "--wait=false")


def applied_again_by_somebody_else(harness: FaultHarness) -> None:
    """Applies the same manifest every ten seconds, as GitOps does. Nothing restarts, and the status does not flap."""
    job = harness.job
    with harness.expect_recovery() as injected:
        pods = {pod["metadata"]["uid"] for pod in job.pods("head") + job.pods("workers")}
        for _ in range(APPLIES):
            job.apply_as("gitops")
            time.sleep(_SECONDS_BETWEEN_APPLIES)
        phases = [seen.status["phase"] for seen in job.history.seen if seen.time > injected.time]
        assert set(phases) == {"Training"}
    assert {pod["metadata"]["uid"] for pod in job.pods("head") + job.pods("workers")} == pods
    assert job.kubectl.get("ftj", job.name)["metadata"]["generation"] == 1


def volume_full_then_grown(harness: FaultHarness) -> None:
    """Fills the job's own volume, which the operator created. A larger `storage.size` repairs it."""
    job = harness.job
    job.move_to_own_volume()
    with harness.expect_recovery():
        job.on_volume("bash", "-c", "dd if=/dev/zero of=/data/fill bs=1M 2>/dev/null; true")
        healthy = job.wait_for(
            "no commits", lambda seen: seen.condition("CheckpointHealthy").get("status") == "False", 300
        )
        assert "No space left" in healthy.condition("CheckpointHealthy")["message"]
        job.patch({"storage": {"size": GROWN_VOLUME}})


def wrong_image_corrected(harness: FaultHarness) -> None:
    """The job is applied with an image that does not exist."""
    stalled = harness.job.wait_for("Stalled", lambda seen: seen.holds("Stalled"), 180).condition("Stalled")
    assert stalled["reason"] in {"ErrImagePull", "ImagePullBackOff"}, stalled
    assert WRONG_IMAGE in stalled["message"]
    harness.job.patch({"cluster": {"image": harness.cluster.image}})
    harness.job.history.wait_for("not Stalled any more", 180, lambda seen: not seen.holds("Stalled"), since=time.time())


def code_that_always_fails(harness: FaultHarness) -> None:
    """A row of the first step holds a token outside the vocabulary; the status never reports training."""
    ended = harness.job.wait_for("the end", lambda seen: seen.holds("Failed") or seen.holds("Complete"))
    failed = ended.condition("Failed")
    assert failed["status"] == "True"
    assert "index out of range" in failed["message"]
    assert f"{FAILURE_LIMIT} times without a new step" in failed["message"]
    assert ended.status["phase"] == "Failed"
    assert ended.status["restarts"]["appError"] == ended.status["restarts"]["total"] == FAILURE_LIMIT
    wait_for("the end of its pods", 180, lambda: not harness.job.pods("head") + harness.job.pods("workers"), every=0.5)


def write_broken_shards(shards: Path, broken: Path, global_batch_size: int, seed: int) -> None:
    """Copy the shards; one row of the step `BROKEN_STEP` gets tokens outside the vocabulary."""
    with tempfile.TemporaryDirectory() as cache, ShardedDataset(str(shards), Path(cache)) as dataset:
        schedule = SampleSchedule(dataset.shard_sizes, global_batch_size, seed)
        bad = int(schedule.sample_ids(BROKEN_STEP - 1)[0])
        columns = {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}
        with MDSWriter(out=str(broken), columns=columns) as writer:
            for sample in range(dataset.num_samples):
                row = dataset[sample]
                unknown = np.full_like(row["input_ids"], VOCABULARY)
                writer.write({**row, "input_ids": unknown} if sample == bad else row)
