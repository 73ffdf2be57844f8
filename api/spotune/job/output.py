"""What a job produces: metrics during training, and the model at the end."""

from typing import Literal

from spotune.custom_resource.base import SecretKeyRef, Section

HUB_TOKEN = "SPOTUNE_HUB_TOKEN"
"""Environment variable with the token that uploads to ``output.hub``. Without it the uploader uses ``HF_TOKEN``."""


class WandbSpec(Section):
    """Weights & Biases."""

    project: str
    """Project to log to."""
    key_secret_ref: SecretKeyRef | None = None
    """Secret with the API key."""


class MlflowSpec(Section):
    """MLflow."""

    uri: str
    """URL of the tracking server."""
    experiment: str = ""
    """Experiment to log to. Empty: the job's name."""


class TrackingSpec(Section):
    """Where loss, throughput and evaluation results are logged."""

    tensorboard: bool = True
    """Write TensorBoard event files to logs/tensorboard in the job's folder."""
    wandb: WandbSpec | None = None
    """Log to Weights & Biases."""
    mlflow: MlflowSpec | None = None
    """Log to MLflow."""


class HubSpec(Section):
    """Upload to the Hugging Face Hub."""

    repo: str
    """Repository, such as me/t5-wikisql."""
    private: bool = True
    """Create the repository as private if it does not exist."""
    token_secret_ref: SecretKeyRef | None = None
    """Secret with a token that has write permission."""
    strategy: Literal["end", "checkpoint"] = "end"
    """end: upload the trained model. checkpoint: also upload new checkpoints to last-checkpoint/ during training."""


class OutputSpec(Section):
    """What happens to the trained model. It is always exported into the job's folder."""

    hub: HubSpec | None = None
    """Upload to the Hugging Face Hub."""
    export: Literal["auto", "best", "last"] = "auto"
    """Checkpoint that is exported: that of the best evaluation (training.evaluation.best), or that of the last step.
    auto: best if training.evaluation.best is set."""
    merge_adapter: bool = True
    """true: export the base model with the adapter merged into it. false: export the adapter alone."""
