"""One run: a training job, the faults of a schedule, the end of the job, and the judgement.

The job trains a tiny model on two to three CPU workers with `execution.reproducible: worldSize`, so an undisturbed run
of two local processes has the same bits, whatever the faults did to the number of workers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from spotune.job import FinetuneJob
from spotune_testcluster.errors import ClusterError
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.job_directory.layout import JobDirectory
from tests.cluster.chaos.checker import ChaosEvidence, findings
from tests.cluster.chaos.injector import Injector
from tests.cluster.chaos.job_volume import JobVolume
from tests.cluster.chaos.records import ChaosRecord
from tests.cluster.chaos.schedule import ChaosSchedule
from tests.cluster.chaos.target import Target
from tests.cluster.faults.timeline import TrainingInterval, training_intervals
from tests.cluster.finetune_jobs import CLAIM, ENDLESS, GLOBAL_BATCH_SIZE, INPUTS, WORKERS, RunArtifacts, Workplace
from tests.cluster.finetune_jobs import RunningJob as Job
from tests.cluster.operator_install import Operator
from tests.proof.history import read_generations, steps_lost, surviving
from tests.provenance import commit, machine
from tests.trainer.support.runs import Layout, epoch_hash, train_generation

logger = logging.getLogger("spotune.chaos")

_SECONDS_TO_START = 300.0
_SECONDS_TO_RECOVER = 900.0
_SECONDS_TO_END = 600.0
_SECONDS_OF_REFERENCE = 3600.0
_STEPS_TO_THE_END = 20
_MOST_FINDINGS = 20


@dataclass(frozen=True)
class ChaosBench:
    """What runs need.

    Attributes:
        cluster: the cluster on this machine.
        operator: the operator in it.
        workplace: a namespace with the inputs of the job on a volume.
        folder: where artifacts are kept, a folder for each seed.
    """

    cluster: ClusterUnderTest
    operator: Operator
    workplace: Workplace
    folder: Path

    def run(self, schedule: ChaosSchedule) -> ChaosRecord:
        """Run a job under the faults of a schedule, and judge it."""
        start = time.monotonic()
        self.operator.wait_until_ready()
        manifest = self._manifest(f"chaos-{schedule.seed}")
        judged: list[tuple[ChaosRecord, ChaosEvidence]] = []
        left: list[str] = []
        try:
            with self.workplace.running(manifest) as job:
                judged.append(self._disturbed(job, manifest, schedule))
        except ClusterError as error:
            if not judged:
                raise
            left.append(f"the job was not deleted: {error}")
        [(record, evidence)] = judged
        found = [*record.findings, *findings(evidence)[:_MOST_FINDINGS], *left]
        return replace(record, findings=found, seconds=round(time.monotonic() - start, 1))

    def _disturbed(
        self, job: Job, manifest: dict[str, Any], schedule: ChaosSchedule
    ) -> tuple[ChaosRecord, ChaosEvidence]:
        target = Target(self.cluster.machine_for("chaos"), self.operator, job, self._volume(job))
        injector = Injector(target)
        problem, steps, recovered, over = "", 0, 0.0, time.time()
        try:
            _wait_for_commit(job)
            injector.play(schedule)
            over = time.time()
            recovered = _wait_for_recovery(job, over)
            steps = _finish(job, manifest, target.volume)
        except (ClusterError, AssertionError, subprocess.SubprocessError) as error:
            problem = "; ".join([str(error).strip()[:500], *getattr(error, "__notes__", [])])[:1500]
        artifacts = RunArtifacts(target.volume.copy_to(self.folder / f"seed-{schedule.seed}"))
        self._keep(artifacts.directory.root, job, injector)
        generations = read_generations(artifacts.directory)
        made = [int(record["step"]) for each in generations for record in each.steps]
        reference = self._undisturbed(manifest, max([steps, *made, 1]))
        intervals = all_intervals(artifacts)
        evidence = ChaosEvidence(
            problem=problem,
            planned_steps=steps or max(made, default=0),
            steps_per_epoch=-(-self._num_samples() // GLOBAL_BATCH_SIZE),
            epoch_hash=epoch_hash(self.workplace.inputs / "shards", self.folder / "cache"),
            generations=generations,
            reference=reference.steps(),
            sha256=_sha256(artifacts.directory),
            reference_sha256=_sha256(reference.directory),
            statuses=job.history.seen,
            intervals=intervals,
            operator_downtime=injector.operator_downtime,
        )
        record = ChaosRecord(
            seed=schedule.seed,
            num_faults=len(schedule.faults),
            faults=injector.injected,
            steps=steps,
            generations=len(generations),
            world_sizes=[size for size, _ in groupby(int(each["worldSize"]) for each in surviving(generations))],
            steps_lost=steps_lost(generations),
            restarts={cause: count for cause, count in artifacts.ledger.restarts().items() if count},
            gap_seconds=round(longest_gap_seconds(intervals, over + recovered), 1),
            recovered_seconds=round(recovered, 1),
            statuses=len(evidence.statuses),
            findings=injector.findings,
            seconds=0.0,
            commit=commit(),
            machine=machine(),
        )
        return record, evidence

    def _keep(self, folder: Path, job: Job, injector: Injector) -> None:
        """Keep what explains a finding beside the files of the job."""
        statuses = "".join(json.dumps({"time": each.time, "job": each.job}) + "\n" for each in job.history.seen)
        (folder / "statuses.jsonl").write_text(statuses)
        (folder / "faults.json").write_text(json.dumps([asdict(fault) for fault in injector.injected], indent=1))
        (folder / "downtime.json").write_text(json.dumps(injector.operator_downtime))
        with suppress(ClusterError, subprocess.SubprocessError):
            (folder / "operator.log").write_text(self.operator.log())
            (folder / "pods.txt").write_text(job.kubectl("get", "pods,events", "--output=wide"))

    def _manifest(self, name: str) -> dict[str, Any]:
        return self.workplace.manifest(
            name,
            training={"maxSteps": ENDLESS},
            execution={"microBatchSize": 2, "zeroStage": 1, "reproducible": "worldSize"},
            checkpoint={"every": 20, "keep": 3},
            workers={"count": WORKERS, "min": 1, "resizeCooldown": "5s"},
            retry={"hangTimeout": "90s"},
        )

    def _volume(self, job: Job) -> JobVolume:
        claim = self.workplace.kubectl.get("pvc", CLAIM)
        return JobVolume(self.cluster.machine_for("chaos"), claim["spec"]["volumeName"], job.directory)

    def _num_samples(self) -> int:
        with ShardedDataset(str(self.workplace.inputs / "shards"), self.folder / "cache") as dataset:
            return dataset.num_samples

    def _undisturbed(self, manifest: dict[str, Any], steps: int) -> RunArtifacts:
        """A run of so many steps on two local processes, without Ray and without a cluster."""
        logger.info("an undisturbed run of %d steps", steps)
        directory = JobDirectory(self.folder / f"undisturbed-{manifest['metadata']['name']}-{steps}")
        directory.root.mkdir(parents=True)
        spec = {**manifest["spec"], "training": {**manifest["spec"]["training"], "maxSteps": steps}}
        text = json.dumps({**manifest, "spec": spec}).replace(INPUTS, str(self.workplace.inputs))
        job = FinetuneJob.model_validate_json(text)
        layout = Layout(WORKERS, int(job.spec.execution.zero_stage))
        micro_batch_size = int(job.spec.execution.micro_batch_size)
        train_generation(directory, job, layout, micro_batch_size=micro_batch_size, timeout=_SECONDS_OF_REFERENCE)
        return RunArtifacts(directory)


def _wait_for_commit(job: Job) -> None:
    """Wait until the status shows a commit of the job, and that it trains."""
    job.history.wait_for(
        "training and a commit",
        _SECONDS_TO_START,
        lambda seen: seen.holds("Ready") and bool(seen.status.get("lastCheckpoint")),
    )


def _wait_for_recovery(job: Job, since: float) -> float:
    """Wait until the status is Ready and shows a step that was never made before; returns the seconds that it took."""
    reached = max((int(seen.status.get("highestStep", 0)) for seen in job.history.seen), default=0)
    found = job.history.wait_for(
        "training after all faults",
        _SECONDS_TO_RECOVER,
        lambda seen: seen.holds("Ready") and int(seen.status.get("highestStep", 0)) > reached,
        since,
    )
    return found.time - since


def _finish(job: Job, manifest: dict[str, Any], volume: JobVolume) -> int:
    """Let the endless job end: suspend it, and apply it again with a few more steps; returns the number of all steps.

    `maxSteps` may not be reduced, except in a new job. The new job continues at the step of the old one.
    """
    job.suspend()
    steps = int(volume.progress()["step"]) + _STEPS_TO_THE_END
    job.delete()
    training = {**manifest["spec"]["training"], "maxSteps": steps}
    job.apply({**manifest, "spec": {**manifest["spec"], "training": training}})
    job.wait_until_complete(_SECONDS_TO_END)
    return steps


def all_intervals(artifacts: RunArtifacts) -> list[TrainingInterval]:
    """The times in which worker groups made steps, also of those that were lost before they wrote when.

    Of these, only their start and the next event in the ledger are known, so they count as making steps between.
    """
    known = {interval.generation: interval for interval in training_intervals(artifacts)}
    events = artifacts.ledger.records()
    for generation in read_generations(artifacts.directory):
        if generation.number in known or not generation.steps:
            continue
        begin = generation.claimed
        ends = [float(event["time"]) for event in events if event["time"] > begin + 1.0]
        last = int(generation.steps[-1]["step"])
        known[generation.number] = TrainingInterval(generation.number, begin, {last: min(ends, default=begin)}, {})
    return sorted(known.values(), key=lambda interval: interval.generation)


def longest_gap_seconds(intervals: Iterable[TrainingInterval], until: float) -> float:
    """Longest time in seconds between two steps that follow each other, before a time."""
    times = sorted(time for interval in intervals for time in interval.steps.values() if time <= until)
    return max((after - before for before, after in pairwise(times)), default=0.0)


def _sha256(directory: JobDirectory) -> str | None:
    weights = directory.export / "model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else None
