"""The status of a job: written by the operator, only read by users."""

from typing import Final, Literal

from pydantic import Field

from spotune.custom_resource.status import Conditions, StatusSection, Timestamp
from spotune.job.node_health import StragglerStatus, UnfitNodeStatus
from spotune.job.pools import PoolStatus


class RestartsStatus(StatusSection):
    """Number of restarts by cause."""

    total: int = 0
    """Number of restarts by any cause."""
    worker_lost: int = 0
    """Lost worker pods or nodes."""
    head_lost: int = 0
    """Lost heads or drivers."""
    preempted: int = 0
    """Preemption notices of spot nodes."""
    hang: int = 0
    """Worker groups without a heartbeat."""
    app_error: int = 0
    """Errors of the model, the data or the code."""
    out_of_memory: int = 0
    """Worker groups that ran out of GPU memory."""


class LastCheckpointStatus(StatusSection):
    """The newest checkpoint."""

    step: int
    """The step after which the state was saved."""
    time: Timestamp
    """Time of the commit (RFC 3339)."""


class BestStatus(StatusSection):
    """The best evaluation so far, by training.evaluation.best."""

    step: int
    """Completed optimizer steps before it."""
    metric: str
    """Name of the metric."""
    value: float
    """Value of the metric."""


class GpuSecondsStatus(StatusSection):
    """GPU seconds of running worker pods, whether they trained or not: the time that a cloud bills."""

    spot: float = 0
    """On spot nodes."""
    on_demand: float = 0
    """On on-demand nodes."""
    as_of: Timestamp | None = None
    """Time up to which they are counted (RFC 3339)."""


class QueueStatus(StatusSection):
    """What a job asks its queue of Kueue for."""

    workers: int
    """Number of worker pods that it asks for. It asks for fewer while the queue has no quota for all."""
    since: Timestamp
    """Time since when it has asked for this number (RFC 3339)."""


class CostStatus(StatusSection):
    """Money for the nodes of workers, whether these trained or not; a worker is taken to have a node for itself."""

    spent: float | None = None
    """Money spent, in `currency`."""
    saved: float | None = None
    """Money saved, compared with the same nodes on demand."""
    currency: str = ""
    """Currency of the prices: a code of ISO 4217."""
    source: str = ""
    """Source of the prices: workers.pools, or that of the operator's values."""
    date: str = ""
    """Day of the prices; empty if it is not known."""
    unpriced_node_seconds: float = 0
    """Seconds of nodes without a price, which are not in `spent`."""
    unknown: str = ""
    """What is not known, and why."""


class DeadlineStatus(StatusSection):
    """The deadline of the job, and the measured speed from which the operator tells whether it holds."""

    time: Timestamp | None = None
    """spec.deadline as a time (RFC 3339)."""
    seconds_per_step: float | None = None
    """Seconds per optimizer step, evaluations included, as last measured."""
    measured_workers: int | None = None
    """Number of workers that ran then."""
    waiting_since: Timestamp | None = None
    """With pools: time from which fewer than workers.count ran (RFC 3339)."""


class PinnedStatus(StatusSection):
    """Settings fixed for the job's lifetime. A change of the spec updates them; an operator upgrade does not."""

    image: str
    """Container image of the trainer."""
    default_image: str
    """The operator's default image when the job started."""
    default_ray_version: str
    """Ray version of the default image."""
    provider: Literal["aks", "gke", "eks", "none"]
    """Cloud provider of the nodes."""
    inputs: str
    """Hash of all spec fields that the pods are built from."""
    ray_cluster: str
    """The rendered spec of the RayCluster, as JSON."""


class TrainedStatus(StatusSection):
    """How long the finished model was trained. If the spec is changed to ask for more, training resumes."""

    epochs: float | None = None
    """training.epochs at the end."""
    max_steps: int | None = None
    """training.maxSteps at the end."""
    step: int | None = None
    """Completed optimizer steps of the exported weights."""


class FinetuneJobStatus(StatusSection):
    """Progress and health of a job."""

    observed_generation: int = 0
    """metadata.generation that this status was computed for."""
    phase: str = ""
    """Phase of the job, for display."""
    generation: int = 0
    """Generation of the running worker group."""
    restarts: RestartsStatus = RestartsStatus()
    """Restarts by cause."""
    step: int = 0
    """Completed optimizer steps."""
    highest_step: int = 0
    """Highest step ever completed. It does not decrease when a restart goes back to a checkpoint."""
    total_steps: int | None = None
    """Total number of optimizer steps."""
    epoch: float | None = None
    """Completed passes over the data."""
    loss: float | None = None
    """Training loss of the last step."""
    eval_loss: float | None = None
    """Loss of the last evaluation. When the model is trained, it is that of the exported model."""
    eval_scores: dict[str, float] | None = None
    """Scores of the last evaluation by metric. When the model is trained, they are those of the exported model. With
    training.function: the numbers that the function reported last, except loss and epoch."""
    eval_step: int | None = None
    """Completed optimizer steps before that evaluation."""
    best: BestStatus | None = None
    """The best evaluation, whose checkpoint is kept."""
    tokens_per_second: float | None = None
    """Training throughput over all workers, in tokens per second."""
    mfu: float | None = None
    """Model FLOPs utilization, 0 to 1."""
    eta: str = ""
    """Expected end of training (RFC 3339)."""
    workers: str = ""
    """Running and desired workers, such as 3/4."""
    last_checkpoint: LastCheckpointStatus | None = None
    """The newest checkpoint."""
    resumed_from_step: int | None = None
    """Step that the current worker group started from: that of a checkpoint, or 0."""
    steps_lost: int = 0
    """Number of steps that were completed and had to be repeated."""
    goodput: float | None = None
    """Fraction of the time spent on steps that count, 0 to 1."""
    gpu_seconds: GpuSecondsStatus = GpuSecondsStatus()
    """GPU seconds used."""
    queue: QueueStatus | None = None
    """What the job asks its queue for; nothing without cluster.queueName."""
    cost: CostStatus | None = None
    """Money spent and saved."""
    pools: list[PoolStatus] = Field(default=[])
    """The workers in each of workers.pools, and what was refused where."""
    pools_moved_at: Timestamp | None = None
    """Time at which workers last left a pool for a better one (RFC 3339)."""
    unfit_nodes: list[UnfitNodeStatus] = Field(default=[])
    """Nodes that are left out until they are booted again: their check failed, or a straggler was replaced."""
    stragglers: list[StragglerStatus] = Field(default=[])
    """Worker processes of the running group that have been slower than the others for long."""
    deadline: DeadlineStatus | None = None
    """The deadline, and the speed that decides whether it holds. The condition DeadlineAtRisk says so."""
    last_progress_time: Timestamp | None = None
    """Time of the newest step, or of the start or resume of the job (RFC 3339)."""
    pinned: PinnedStatus | None = None
    """Settings fixed for the job's lifetime."""
    trained: TrainedStatus | None = None
    """How long the finished model was trained."""
    ray_cluster: str = ""
    """Name of the RayCluster."""
    output: str = ""
    """Location of the trained model: pvc://claim/path, or its URL in the job's bucket."""
    conditions: Conditions = Field(default=[])
    """Conditions: Ready, Reconciling, Stalled, Complete, Failed, Suspended, and conditions specific to spotune."""


_SILENT_SECONDS: Final = 15.0
"""Where the usual time between two heartbeats is not known. Training ranks send one with every micro-batch."""
_LEAST_SILENT_SECONDS: Final = 4.0
"""A slow volume delays what the ranks report."""


def max_silence(usual_seconds: float | None) -> float:
    """The longest time without a heartbeat of training ranks after which all of them count as alive.

    It is twice the usual time between two heartbeats, and two seconds more.

    Args:
        usual_seconds: The longest time between two recent heartbeats; None if it is not known.
    """
    return _SILENT_SECONDS if usual_seconds is None else max(_LEAST_SILENT_SECONDS, 2 * usual_seconds + 2.0)
