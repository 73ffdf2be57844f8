"""The FinetuneJob: Pydantic models of the file that a user writes and of the resource that the operator reads."""

from spotune.job.cluster import ClusterSpec, HeadSpec, WorkersSpec
from spotune.job.dataset import DatasetSpec, EvalSpec, MixtureSourceSpec, PrepareSpec, ShardsSpec
from spotune.job.execution import CheckpointSpec, ExecutionSpec
from spotune.job.finetunejob import KIND, FinetuneJob, FinetuneJobSpec
from spotune.job.lifecycle import BackoffSpec, CleanupSpec, RetrySpec
from spotune.job.model import AdapterSpec, LoraSpec, ModelSpec
from spotune.job.node_health import StragglerStatus, UnfitNodeStatus
from spotune.job.output import HubSpec, MlflowSpec, OutputSpec, TrackingSpec, WandbSpec
from spotune.job.pools import PoolSpec, PoolStatus, cheapest_first
from spotune.job.serving import JobServingSpec
from spotune.job.status import (
    BestStatus,
    CostStatus,
    DeadlineStatus,
    FinetuneJobStatus,
    GpuSecondsStatus,
    LastCheckpointStatus,
    PinnedStatus,
    QueueStatus,
    RestartsStatus,
    TrainedStatus,
)
from spotune.job.storage import CredentialsSpec, StorageSpec
from spotune.job.training import BestSpec, EarlyStoppingSpec, EvaluationSpec, HarnessSpec, SqlSpec, TrainingSpec
from spotune.job.training.metric import Metric

__all__ = [
    "KIND",
    "AdapterSpec",
    "BackoffSpec",
    "BestSpec",
    "BestStatus",
    "CheckpointSpec",
    "CleanupSpec",
    "ClusterSpec",
    "CostStatus",
    "CredentialsSpec",
    "DatasetSpec",
    "DeadlineStatus",
    "EarlyStoppingSpec",
    "EvalSpec",
    "EvaluationSpec",
    "ExecutionSpec",
    "FinetuneJob",
    "FinetuneJobSpec",
    "FinetuneJobStatus",
    "GpuSecondsStatus",
    "HarnessSpec",
    "HeadSpec",
    "HubSpec",
    "JobServingSpec",
    "LastCheckpointStatus",
    "LoraSpec",
    "Metric",
    "MixtureSourceSpec",
    "MlflowSpec",
    "ModelSpec",
    "OutputSpec",
    "PinnedStatus",
    "PoolSpec",
    "PoolStatus",
    "PrepareSpec",
    "QueueStatus",
    "RestartsStatus",
    "RetrySpec",
    "ShardsSpec",
    "SqlSpec",
    "StorageSpec",
    "StragglerStatus",
    "TrackingSpec",
    "TrainedStatus",
    "TrainingSpec",
    "UnfitNodeStatus",
    "WandbSpec",
    "WorkersSpec",
    "cheapest_first",
]
