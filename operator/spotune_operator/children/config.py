"""The ConfigMap with the job file for the trainer."""

from typing import Any, Final

import yaml

from spotune.custom_resource import API_VERSION
from spotune.job import KIND, FinetuneJob
from spotune_operator.children.resolved_job import ResolvedJob

_Dumper: Final = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml is several times as fast, with the same output; not every build of PyYAML has it."""
JOB_FILE: Final = "job.yaml"
_FOR_PODS_ONLY = (
    *("head", "storage", "cluster", "cleanup", "suspend", "serving", "deadline", "maxCost"),
    "ttlSecondsAfterFinished",
)
"""Sections that the operator alone acts on: a change of them must not make the trainer restart, or refuse the job."""


def config_map(resolved: ResolvedJob) -> dict[str, Any]:
    """The ConfigMap with the job file of the supervisor.

    Fields with their defaults are left out. A newer definition adds fields with defaults to every job that runs, and
    the supervisor of an older image refuses a file with fields that it does not know.
    """
    job = trainer_job(resolved.job).model_dump(mode="json", exclude_defaults=True)
    content = yaml.dump({"apiVersion": API_VERSION, "kind": KIND, **job}, Dumper=_Dumper, sort_keys=False)
    return resolved.child("v1", "ConfigMap", "config") | {"data": {JOB_FILE: content}}


def trainer_job(job: FinetuneJob) -> FinetuneJob:
    """The job without what the operator acts on: pods, storage, and Secrets, which pods get as variables."""
    content = job.model_dump(exclude_unset=True)
    metadata, spec = content["metadata"], content["spec"]
    for section in _FOR_PODS_ONLY:
        spec.pop(section, None)
    spec.get("model", {}).pop("tokenSecretRef", None)
    spec.get("dataset", {}).pop("credentials", None)
    (spec.get("training", {}).get("codeFrom", {}).get("git") or {}).pop("tokenSecretRef", None)
    for field in (
        *("capacity", "onDemandAfter", "resources", "serviceAccountName", "podTemplate"),
        *("pools", "poolPatience", "mixGpuTypes"),
    ):
        spec.get("workers", {}).pop(field, None)
    named = {"name": metadata["name"], "namespace": job.metadata.namespace}
    reduced = {"apiVersion": API_VERSION, "kind": KIND, "metadata": named, "spec": spec}
    return FinetuneJob.model_validate(reduced, by_alias=True, by_name=False)
