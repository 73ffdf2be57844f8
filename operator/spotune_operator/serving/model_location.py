"""Where the model of a service is: on the volume of a trained FinetuneJob, on a claim, or on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final

from spotune.service import ClaimSource, ModelService, ModelServiceStatus
from spotune_operator.children.serving.resolved_service import ModelLocation
from spotune_operator.kube.conditions import Finding
from spotune_operator.serving.state import ObservedService, TrainedModel

_CLAIM_SCHEME: Final = "pvc://"
MODEL_AVAILABLE: Final = "ModelAvailable"


@dataclass(frozen=True)
class Models:
    """The locations of model and adapters, and the condition about them.

    Attributes:
        model: The model; None while it is not available.
        adapters: The adapters by model id; incomplete while one is not available.
        finding: The condition ``ModelAvailable``.
    """

    model: ModelLocation | None
    finding: Finding
    adapters: Mapping[str, ModelLocation] = field(default_factory=dict)

    @property
    def are_available(self) -> bool:
        """Whether model and adapters can be served."""
        return self.finding.status == "True"


def locate_models(service: ModelService, observed: ObservedService, previous: ModelServiceStatus) -> Models:
    """Locate the model and the adapters of a service.

    A model that is served stays available while its FinetuneJob trains on, or was deleted: its last export is kept.
    """
    spec = service.spec.model
    finding: Finding | None = None
    if spec.finetune_job:
        model, finding = _trained(spec.finetune_job, observed.jobs.get(spec.finetune_job), "spec.model.finetuneJob")
        model = model or _served_before(previous, spec.finetune_job)
        finding = None if model is not None else finding
    elif spec.claim is not None:
        model = _on_claim(spec.claim)
    else:
        model = ModelLocation(source=spec.source, version=spec.revision)
    adapters: dict[str, ModelLocation] = {}
    for number, adapter in enumerate(service.spec.adapters):
        if adapter.claim is not None:
            adapters[adapter.name] = _on_claim(adapter.claim)
            continue
        field_name = f"spec.adapters[{number}].finetuneJob"
        location, problem = _trained(adapter.finetune_job, observed.jobs.get(adapter.finetune_job), field_name)
        if location is not None:
            adapters[adapter.name] = location
        finding = finding or problem
    if finding is None:
        finding = Finding(MODEL_AVAILABLE, "True", "Available", "the model can be loaded from its location")
    return Models(model, finding, adapters)


def location_text(location: ModelLocation) -> str:
    """The location as in ``status.model.location``."""
    return location.source or f"{_CLAIM_SCHEME}{location.claim}/{location.path}"


def _trained(name: str, job: TrainedModel | None, field_name: str) -> tuple[ModelLocation | None, Finding | None]:
    """The location of the model of a FinetuneJob, or why there is none yet."""
    if job is None:
        message = f"{field_name}: there is no FinetuneJob {name} in this namespace: create it, or correct the name"
        return None, Finding(MODEL_AVAILABLE, "False", "JobNotFound", message)
    if not job.output:
        if job.has_failed:
            message = f"{field_name}: the FinetuneJob {name} has failed, so there is no model: see its condition Failed"
            return None, Finding(MODEL_AVAILABLE, "False", "JobFailed", message)
        phase = f" (phase {job.phase})" if job.phase else ""
        message = f"waiting for the FinetuneJob {name} to finish{phase}"
        return None, Finding(MODEL_AVAILABLE, "False", "JobNotFinished", message)
    claim, _, path = job.output.removeprefix(_CLAIM_SCHEME).partition("/")
    return ModelLocation(claim=claim, path=path, version=f"{_job_directory(path)}-step-{job.step}"), None


def _job_directory(path: str) -> str:
    """The name of a job's directory, which ends with the fingerprint of its spec: ``namespace/directory/export``."""
    return PurePosixPath(path).parent.name


def _served_before(previous: ModelServiceStatus, job: str) -> ModelLocation | None:
    """The location in the status, if it is an export of this job."""
    if previous.model is None or not previous.model.location.startswith(_CLAIM_SCHEME):
        return None
    claim, _, path = previous.model.location.removeprefix(_CLAIM_SCHEME).partition("/")
    if _job_directory(path).rpartition("-")[0] != job:
        return None
    return ModelLocation(claim=claim, path=path, version=previous.model.version)


def _on_claim(claim: ClaimSource) -> ModelLocation:
    return ModelLocation(claim=claim.name, path=claim.path.strip("/"), version=claim.path.strip("/"))
