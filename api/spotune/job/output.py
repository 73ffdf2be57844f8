"""What comes out: metrics while it trains, and the model at the end."""

from typing import Literal

from spotune.job.base import SecretKeyRef, Section


class WandbSpec(Section):
    """Weights & Biases."""

    project: str
    """Project that the run is logged to."""
    key_secret_ref: SecretKeyRef | None = None
    """Secret with the API key."""


class MlflowSpec(Section):
    """MLflow."""

    uri: str
    """URL of the tracking server."""
    experiment: str = ""
    """Experiment that the run is logged to; empty: the job's name."""


class TrackingSpec(Section):
    """Where loss, throughput and evaluation are logged."""

    tensorboard: bool = True
    """Write TensorBoard event files into logs/tensorboard of the job's folder."""
    wandb: WandbSpec | None = None
    """Log to Weights & Biases."""
    mlflow: MlflowSpec | None = None
    """Log to MLflow."""


class HubSpec(Section):
    """Upload to the Hugging Face Hub."""

    repo: str
    """Repository, such as me/t5-wikisql."""
    private: bool = True
    """Whether a repository that does not exist yet is made private."""
    token_secret_ref: SecretKeyRef | None = None
    """Secret with a token that may write."""
    strategy: Literal["end", "checkpoint"] = "end"
    """end: the trained model; checkpoint: while it trains the newest checkpoint, too, in last-checkpoint/."""


class OutputSpec(Section):
    """What happens to the trained model; it is always exported into the job's folder."""

    hub: HubSpec | None = None
    """Upload it to the Hugging Face Hub."""
    merge_adapter: bool = True
    """Export the base model with the adapter merged into it; false: the adapter alone."""
