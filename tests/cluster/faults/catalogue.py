"""The faults of `make faults`, each with the job that it hits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.faults import control_plane, nodes, objects, pods, processes
from tests.cluster.faults.harness import FaultHarness
from tests.cluster.finetune_jobs import ENDLESS, GLOBAL_BATCH_SIZE, INPUTS, SMALL, STEPS, Workplace

HANG_TIMEOUT = "25s"
_SEED = 7
_STEPS = 3 * STEPS
"""So many that a fast machine has not made all of them before the status reports the fault."""
_WORKERS_KEPT = "worker pods kept"
_GROUP_KEPT = "worker group not started again, no step lost"


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        name: What happens.
        inject: Injects the fault, and asserts what must hold afterwards.
        asserted: What it checks in addition to the checks of every job.
        sections: Sections of the job's spec, merged over those of a tiny job.
        endless: Whether the job trains until the fault is over, because the fault takes long.
        prepare: Called before the job is applied.
        trains: Whether the job produces a model.
    """

    name: str
    inject: Callable[[FaultHarness], None]
    asserted: str
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    endless: bool = False
    prepare: Callable[[Workplace], None] | None = None
    trains: bool = True

    @property
    def slug(self) -> str:
        """Name of the job and the test."""
        return self.inject.__name__.replace("_", "-")

    def manifest(self, workplace: Workplace) -> dict[str, Any]:
        """The FinetuneJob manifest."""
        sections = {"training": {"maxSteps": ENDLESS if self.endless else _STEPS}, **self.sections}
        if "storage" in sections:
            sections["storage"] = {"storageClassName": workplace.cluster.storage_class, **sections["storage"]}
        return workplace.manifest(self.slug, **sections)


def _break_data(workplace: Workplace) -> None:
    inputs = workplace.inputs
    objects.write_broken_shards(inputs / "shards", inputs / "broken-shards", GLOBAL_BATCH_SIZE, _SEED)
    workplace.add_input("broken-shards")


def with_a_gpu(image: str) -> dict[str, Any]:
    """A pod template whose extra container requests a GPU; the workers train on CPUs."""
    limits = {"limits": {"nvidia.com/gpu": "1"}}
    holder = {"name": "gpu", "image": image, "command": ["sleep", "infinity"]}
    return {"spec": {"containers": [{**holder, "resources": limits, "securityContext": _SECURITY}]}}


_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_GPU_IMAGE = "testcluster.local/trainer:1"
_ON_GPUS = {"workers": {"resources": SMALL, "podTemplate": with_a_gpu(_GPU_IMAGE)}}

CASES = (
    Case("worker pod deleted", pods.worker_pod_deleted, "the other worker pod kept"),
    Case("worker process `kill -9`", processes.worker_process_killed, _WORKERS_KEPT),
    Case("head pod deleted", pods.head_pod_deleted, _GROUP_KEPT, endless=True),
    Case("head pod deleted by force", pods.head_pod_deleted_by_force, _GROUP_KEPT, endless=True),
    Case("head pod deleted in a long step", pods.head_pod_deleted_in_a_long_step, _GROUP_KEPT, endless=True),
    Case("Ray container of the head killed", processes.ray_container_of_the_head_killed, _GROUP_KEPT, endless=True),
    Case("supervisor killed", processes.supervisor_killed, f"{_WORKERS_KEPT}, worker group not started again"),
    Case("head and one worker at once", pods.head_and_one_worker_deleted_at_once, "the other worker pod kept"),
    Case("every pod at once", pods.every_pod_gone_at_once, "goes on from the last commit"),
    Case(
        "operator killed at random moments",
        control_plane.operator_killed_at_random_moments,
        f"{_WORKERS_KEPT}, worker group not started again",
        endless=True,
    ),
    Case(
        "operator down for the whole time of a head loss",
        control_plane.operator_down_while_the_head_is_lost,
        f"{_GROUP_KEPT}, another head while there is no operator",
        endless=True,
    ),
    Case(
        "API server restarted",
        control_plane.api_server_restarted,
        f"{_WORKERS_KEPT}, worker group not started again",
        endless=True,
    ),
    Case(
        "the same manifest applied by somebody else every ten seconds, thirty times",
        objects.applied_again_by_somebody_else,
        f"{_WORKERS_KEPT}, worker group not started again, phase Training all the time",
        endless=True,
    ),
    Case(
        "operator upgraded and rolled back by its chart",
        control_plane.operator_upgraded_and_rolled_back,
        f"{_WORKERS_KEPT}, worker group not started again",
        endless=True,
    ),
    Case(
        "operator cut off from the pods for two minutes",
        control_plane.operator_cut_off_from_the_pods,
        f"{_WORKERS_KEPT}, worker group not started again, Training Unknown meanwhile",
        endless=True,
    ),
    Case("node of a worker crashed", nodes.node_of_a_worker_crashed, "the other worker pod kept"),
    Case(
        "node of the head crashed",
        nodes.node_of_the_head_crashed,
        f"{_GROUP_KEPT}; the operator is lost with it",
        endless=True,
    ),
    Case("RayCluster deleted by hand", objects.ray_cluster_deleted, "made again"),
    Case(
        "volume full, then grown",
        objects.volume_full_then_grown,
        "the status names the cause; a larger storage.size mends it",
        sections={"storage": {"existingClaim": "", "size": objects.SMALL_VOLUME, "retain": False}},
    ),
    Case(
        "code that always fails",
        objects.code_that_always_fails,
        f"Failed with the error's text after {objects.FAILURE_LIMIT} tries, pods gone",
        sections={
            "dataset": {"train": {"source": f"{INPUTS}/broken-shards"}},
            "retry": {"appFailureLimit": objects.FAILURE_LIMIT},
        },
        prepare=_break_data,
        trains=False,
    ),
    Case(
        "a hang",
        processes.worker_process_hangs,
        _WORKERS_KEPT,
        sections={"retry": {"hangTimeout": HANG_TIMEOUT}},
    ),
    Case(
        "wrong image",
        objects.wrong_image_corrected,
        "Stalled with the kubelet's words, goes on once corrected",
        sections={"cluster": {"image": objects.WRONG_IMAGE}},
    ),
    Case(
        "GPU lost on a node",
        nodes.gpu_lost,
        f"the node is healed, {_WORKERS_KEPT}",
        sections=_ON_GPUS,
        endless=True,
    ),
    Case(
        "GPU lost for good",
        nodes.gpu_lost_for_good,
        "the node is drained and given back, the other worker pod kept",
        sections=_ON_GPUS,
        endless=True,
    ),
)
"""In the order of docs/faults.md."""
