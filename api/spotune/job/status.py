"""What the operator reports about a job; a user reads it and never writes it."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from spotune.job.base import Section

Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class _Report(Section):
    """A part of the status; fields of a newer version are passed over."""

    model_config = ConfigDict(extra="ignore")


class RestartsStatus(_Report):
    """Number of restarts by cause."""

    total: int = 0
    """Restarts by any cause."""
    worker_lost: int = 0
    """Worker pods or their nodes that were lost."""
    head_lost: int = 0
    """Heads or drivers that were lost."""
    preempted: int = 0
    """Spot notices."""
    hang: int = 0
    """Worker groups that gave no sign of life."""
    app_error: int = 0
    """Errors of the model, the data or the code."""
    out_of_memory: int = 0
    """Worker groups that ran out of GPU memory."""


class LastCheckpointStatus(_Report):
    """The newest checkpoint."""

    step: int
    """Step that it holds the state after."""
    time: Timestamp
    """When it was committed (RFC 3339)."""


class GpuSecondsStatus(_Report):
    """GPU seconds of worker pods that ran, whether they trained or not: what a cloud asks money for."""

    spot: float = 0
    """On spot nodes."""
    on_demand: float = 0
    """On on-demand nodes."""
    as_of: Timestamp | None = None
    """Until when they were counted (RFC 3339)."""


class PinnedStatus(_Report):
    """What a job is run with until it ends; changed by a change of the spec, not by an operator of another version."""

    image: str
    """Container image of the trainer."""
    default_image: str
    """The image for a job that names none, as the operator had it at the job's start."""
    default_ray_version: str
    """Ray version of that image."""
    provider: Literal["aks", "gke", "eks", "none"]
    """Cloud of the nodes."""
    inputs: str
    """Hash of all in the spec that pods are made from."""
    ray_cluster: str
    """The RayCluster's spec as it was rendered, in JSON."""


class TrainedStatus(_Report):
    """How long the finished model was trained; a spec that asks for more lets the job go on."""

    epochs: float | None = None
    """training.epochs at the end."""
    max_steps: int | None = None
    """training.maxSteps at the end."""


class Condition(_Report):
    """A metav1.Condition of Kubernetes."""

    type: str
    """Name, such as Ready."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    observed_generation: int = 0
    """metadata.generation that it was found for."""
    last_transition_time: Timestamp
    """When status changed last (RFC 3339)."""
    reason: str
    """One word for programs."""
    message: str = ""
    """A sentence for people."""


class FinetuneJobStatus(_Report):
    """Progress and health of a job."""

    observed_generation: int = 0
    """metadata.generation that this status belongs to."""
    phase: str = ""
    """Where the job is, for people."""
    generation: int = 0
    """Generation of the running worker group."""
    restarts: RestartsStatus = RestartsStatus()
    """Restarts by cause."""
    step: int = 0
    """Optimizer steps done."""
    highest_step: int = 0
    """Newest step that was ever done; a restart goes back to a checkpoint, this does not."""
    total_steps: int | None = None
    """Optimizer steps in all."""
    epoch: float | None = None
    """Passes over the data done."""
    loss: float | None = None
    """Training loss of the last step."""
    eval_loss: float | None = None
    """Loss of the last evaluation."""
    eval_scores: dict[str, float] | None = None
    """Scores of the last evaluation's answers, by metric."""
    tokens_per_second: float | None = None
    """Tokens trained per second over all workers."""
    mfu: float | None = None
    """Model FLOPs utilization, 0 to 1."""
    eta: str = ""
    """When training is expected to end (RFC 3339)."""
    workers: str = ""
    """Workers running and wanted, such as 3/4."""
    last_checkpoint: LastCheckpointStatus | None = None
    """The newest checkpoint."""
    resumed_from_step: int | None = None
    """Step that the running worker group started from."""
    steps_lost: int = 0
    """Steps that were done and had to be done again."""
    goodput: float | None = None
    """Part of the time that went into steps that count, 0 to 1."""
    gpu_seconds: GpuSecondsStatus = GpuSecondsStatus()
    """GPU seconds used."""
    last_progress_time: Timestamp | None = None
    """When the newest step was done, or the job was started or resumed (RFC 3339)."""
    pinned: PinnedStatus | None = None
    """What the job is run with until it ends."""
    trained: TrainedStatus | None = None
    """How long the finished model was trained."""
    ray_cluster: str = ""
    """Name of the RayCluster."""
    output: str = ""
    """Where the trained model is."""
    conditions: list[Condition] = Field(
        default=[], json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    )
    """Conditions: Ready, Reconciling, Stalled, Complete, Failed, Suspended and the domain's own."""
