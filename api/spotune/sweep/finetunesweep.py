"""The FinetuneSweep: a search for hyperparameters, whose trials are FinetuneJobs."""

from typing import Final, Literal, Self

from pydantic import model_validator

from spotune.custom_resource.base import API_VERSION, Section, invalid
from spotune.custom_resource.metadata import MAX_NAME_LENGTH, Metadata
from spotune.sweep.spec import MAX_TRIALS, FinetuneSweepSpec
from spotune.sweep.status import FinetuneSweepStatus

SWEEP_KIND: Final = "FinetuneSweep"
MAX_SWEEP_NAME_LENGTH: Final = MAX_NAME_LENGTH - len(f"-{MAX_TRIALS - 1}")
"""The job of a trial is named <sweep>-<number>."""


class FinetuneSweep(Section):
    """A search for the best hyperparameters of a finetuning job, with a FinetuneJob for each trial."""

    api_version: Literal["spotune.dev/v1alpha1"] = API_VERSION
    """API version."""
    kind: Literal["FinetuneSweep"] = SWEEP_KIND
    """Kind of the object."""
    metadata: Metadata
    """Name, namespace and labels."""
    spec: FinetuneSweepSpec
    """Which hyperparameters are searched, how, and for which job."""
    status: FinetuneSweepStatus | None = None
    """Progress of the sweep, written by the operator."""

    def trial_name(self, number: int) -> str:
        """Name of the FinetuneJob of a trial."""
        return f"{self.metadata.name}-{number}"

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        name = self.metadata.name
        if len(name) > MAX_SWEEP_NAME_LENGTH:
            limit = f"at most {MAX_SWEEP_NAME_LENGTH} are allowed, because names of trials are made from it"
            invalid("metadata.name", f"has {len(name)} characters; {limit}")
        return self
