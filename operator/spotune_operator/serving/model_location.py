"""Where the model of a service is: on the volume of a trained FinetuneJob, on a claim, on the Hub, or in a bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final

from spotune.service import ClaimSource, LocationStatus, ModelService, ModelServiceStatus, ServedVersionStatus
from spotune_operator.children.serving.resolved_service import ModelLocation, application_name
from spotune_operator.kube.conditions import Finding
from spotune_operator.kube.digest import digest
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
        field_name = "spec.model.finetuneJob"
        served: LocationStatus | None = previous.pending_model or previous.model
        model, finding = _of_job(spec.finetune_job, observed, served, field_name)
    elif spec.claim is not None:
        model, finding = claim_location(spec.claim), _missing(spec.claim, observed, "spec.model.claim")
    else:
        model = source_location(spec.source, spec.revision)
    adapters: dict[str, ModelLocation] = {}
    for number, adapter in enumerate(service.spec.adapters):
        if adapter.claim is not None:
            adapters[adapter.name] = claim_location(adapter.claim)
            finding = finding or _missing(adapter.claim, observed, f"spec.adapters[{number}].claim")
            continue
        field_name = f"spec.adapters[{number}].finetuneJob"
        served = previous.adapters.get(adapter.name)
        location, problem = _of_job(adapter.finetune_job, observed, served, field_name)
        if location is not None:
            adapters[adapter.name] = location
        finding = finding or problem
    if finding is None:
        finding = Finding(MODEL_AVAILABLE, "True", "Available", "the model can be loaded from its location")
    return Models(model, finding, adapters)


def location_status(location: ModelLocation) -> LocationStatus:
    """A location as in the status."""
    place = location.source or f"{_CLAIM_SCHEME}{location.claim}/{location.path}"
    return LocationStatus(location=place, version=location.version)


def location_of(status: LocationStatus) -> ModelLocation:
    """The location that a status describes."""
    if not status.location.startswith(_CLAIM_SCHEME):
        return ModelLocation(source=status.location, version=status.version)
    claim, _, path = status.location.removeprefix(_CLAIM_SCHEME).partition("/")
    return ModelLocation(claim=claim, path=path, version=status.version)


def newest_version(
    service: ModelService, models: Models, observed: ObservedService, previous: ModelServiceStatus
) -> ServedVersionStatus | None:
    """The version that the service should serve; None while it is not available.

    A known version keeps its name and its scores, because its FinetuneJob may train on. The name is the version, with
    the digest of the application if another version has that name, such as the same model with other adapters: gateways
    tell versions apart by their names.
    """
    if models.model is None or not models.are_available:
        return None
    application = application_name(models.model, models.adapters)
    retiring = [each.model_dump(exclude={"since", "weight"}) for each in previous.retiring]
    known = [found for found in (previous.model, previous.pending_model) if found is not None]
    known += [ServedVersionStatus.model_validate(each) for each in retiring]
    for found in known:
        if found.application == application:
            return found
    place, job = location_status(models.model), observed.jobs.get(service.spec.model.finetune_job)
    is_taken = place.version in [found.name for found in known]
    return ServedVersionStatus(
        location=place.location,
        version=place.version,
        name=f"{place.version}-{application.rpartition('-')[2]}" if is_taken else place.version,
        application=application,
        adapters={name: location_status(found) for name, found in models.adapters.items()},
        scores=dict(job.scores) if job is not None else {},
        task=job.task if job is not None else "",
    )


def _of_job(
    name: str, observed: ObservedService, served: LocationStatus | None, field_name: str
) -> tuple[ModelLocation | None, Finding | None]:
    """The location of the model of a FinetuneJob, in the newest version or else in the served one; or why it has none.

    Args:
        name: Name of the FinetuneJob.
        observed: The state of the cluster.
        served: The version in the status; it may be that of another job.
        field_name: The field that names the job.
    """
    location, finding = _trained(name, observed.jobs.get(name), field_name)
    location = location or _served_before(served, name)
    return location, None if location is not None else finding


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
    if not job.output.startswith(_CLAIM_SCHEME):
        return ModelLocation(source=job.output, version=f"{_bucket_version(name, job.output)}{job.step}"), None
    claim, _, path = job.output.removeprefix(_CLAIM_SCHEME).partition("/")
    return ModelLocation(claim=claim, path=path, version=f"{_job_directory(path)}-step-{job.step}"), None


def _job_directory(path: str) -> str:
    """The name of a job's directory, which ends with the fingerprint of its spec: ``namespace/directory/export``."""
    return PurePosixPath(path).parent.name


def _bucket_version(job: str, url: str) -> str:
    """The version of a job's export in a bucket, up to the number of its step."""
    return f"{job}-{digest(url)}-step-"


def _served_before(served: LocationStatus | None, job: str) -> ModelLocation | None:
    """The served location, if it is an export of this job."""
    location = location_of(served) if served is not None else ModelLocation()
    if location.source:
        return location if location.version.startswith(_bucket_version(job, location.source)) else None
    return location if location.claim and _job_directory(location.path).rpartition("-")[0] == job else None


def _missing(claim: ClaimSource, observed: ObservedService, field_name: str) -> Finding | None:
    """The finding about a claim that does not exist; None if it does, or if that is not known."""
    if claim.name not in (observed.missing_claims or ()):
        return None
    missing = f"there is no PersistentVolumeClaim {claim.name} in this namespace: create it, or correct the name"
    return Finding(MODEL_AVAILABLE, "False", "ClaimNotFound", f"{field_name}: {missing}")


def claim_location(claim: ClaimSource) -> ModelLocation:
    """The location of a folder on a claim."""
    return ModelLocation(claim=claim.name, path=claim.path.strip("/"), version=claim.path.strip("/"))


def source_location(source: str, revision: str) -> ModelLocation:
    """The location of a model: on the Hub its version is the revision, in a bucket the prefix."""
    if source.startswith("hf://"):
        return ModelLocation(source=source, version=revision)
    prefix = source.removeprefix("s3://").partition("/")[2]
    return ModelLocation(source=source, version=prefix.rstrip("/"))
