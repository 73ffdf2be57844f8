"""The ModelService of a FinetuneJob with ``spec.serving``."""

from typing import Any

from spotune.custom_resource import API_VERSION
from spotune.service import SERVICE_KIND
from spotune_operator.children.resolved_job import ResolvedJob


def model_service(resolved: ResolvedJob) -> dict[str, Any] | None:
    """The ModelService that serves the job's model; None without ``spec.serving``.

    It is deleted with the job, as its other children are, even if ``storage.retain`` keeps the volume.
    """
    job = resolved.job
    if job.spec.serving is None:
        return None
    spec = job.spec.serving.model_dump(mode="json", exclude_unset=True, exclude={"name"})
    manifest = resolved.child(API_VERSION, SERVICE_KIND, "serving")
    manifest["metadata"]["name"] = job.service_name
    return manifest | {"spec": {"model": {"finetuneJob": job.metadata.name}, **spec}}
