"""The objects that FinetuneJobs name: claims, Secrets, ConfigMaps with code, and service accounts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spotune_operator.cli.doctor.references import Reference, claim, secret, service_account

Manifest = Mapping[str, Any]


def needs_objects(job: Manifest) -> bool:
    """Whether a job still needs what it names: it has not ended."""
    return (job.get("status") or {}).get("phase") not in ("Complete", "Failed")


def references(job: Manifest) -> Iterator[Reference]:
    """The objects that a job names."""
    namespace, spec = job["metadata"]["namespace"], job.get("spec") or {}
    if name := _at(spec, "storage").get("existingClaim"):
        yield claim("spec.storage.existingClaim", name, namespace, "all pods stay Pending")
    for path in ("model.tokenSecretRef", "output.hub.tokenSecretRef", "tracking.wandb.keySecretRef"):
        if given := _at(spec, path):
            yield secret(f"spec.{path}", given, namespace)
    for section in ("dataset.credentials", "storage.credentials"):
        if name := _at(spec, section).get("secretName"):
            yield secret(f"spec.{section}.secretName", {"name": name}, namespace)
    code_from = _at(spec, "training.codeFrom")
    if given := _at(code_from, "git.tokenSecretRef"):
        yield secret("spec.training.codeFrom.git.tokenSecretRef", given, namespace)
    if name := _at(code_from, "configMap").get("name"):
        path, effect = f"/api/v1/namespaces/{namespace}/configmaps/{name}", "the head does not start"
        yield Reference(
            "spec.training.codeFrom.configMap", "ConfigMap", path, effect, "create it, or correct the field"
        )
    if account := _at(spec, "workers").get("serviceAccountName"):
        yield service_account("spec.workers.serviceAccountName", account, namespace)


def _at(spec: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """The section at a path such as ``output.hub``; empty if it is not given."""
    found: Mapping[str, Any] = spec
    for name in path.split("."):
        found = found.get(name) or {}
    return found
