"""The job as the trainer in the pods reads it."""

from typing import Any, Final

import yaml

from spotune.job import API_VERSION, KIND, FinetuneJob
from spotune_operator.children.resolved_job import PlacedJob

_Dumper: Final = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml writes the same several times as fast; not every build of PyYAML has it."""
JOB_FILE: Final = "job.yaml"
_FOR_PODS_ONLY = ("head", "storage", "cluster", "cleanup", "suspend")
"""Sections that are pods by the time that the trainer runs: it must not restart, nor refuse, for a change of them."""


def config_map(placed: PlacedJob) -> dict[str, Any]:
    """A ConfigMap with the job file that the supervisor is started with."""
    job = trainer_job(placed.job).model_dump(mode="json", exclude_unset=True)
    content = yaml.dump(job, Dumper=_Dumper, sort_keys=False)
    return placed.child("v1", "ConfigMap", "config") | {"data": {JOB_FILE: content}}


def trainer_job(job: FinetuneJob) -> FinetuneJob:
    """The job without what the operator has already acted on: pods, storage, and Secrets, which are variables there."""
    content = job.model_dump(exclude_unset=True)
    metadata, spec = content["metadata"], content["spec"]
    for section in _FOR_PODS_ONLY:
        spec.pop(section, None)
    spec["model"].pop("tokenSecretRef", None)
    spec["dataset"].pop("credentials", None)
    for field in ("capacity", "onDemandAfter", "resources", "serviceAccountName", "podTemplate"):
        spec.get("workers", {}).pop(field, None)
    named = {"name": metadata["name"], "namespace": job.metadata.namespace}
    reduced = {"apiVersion": API_VERSION, "kind": KIND, "metadata": named, "spec": spec}
    return FinetuneJob.model_validate(reduced, by_alias=True, by_name=False)
