"""Environment variables of the containers: defaults, Secrets of the job, and Ray's token."""

from typing import Any, Final

from spotune.job.base import SecretKeyRef
from spotune.job.output import HUB_TOKEN
from spotune_operator.children.resolved_job import ResolvedJob

CACHE: Final = "/cache"
"""Mount path of the emptyDir for caches of models and shards; it survives a restart of the container."""


def default_environment() -> list[dict[str, Any]]:
    """Variables that a pod template may override."""
    settings = {
        "HOME": CACHE,  # the image may have no home directory for the uid of the pod
        "USER": "spotune",  # PyTorch needs a user name
        "SPOTUNE_CACHE": f"{CACHE}/spotune",
        "PYTHONUNBUFFERED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return [variable(name, value) for name, value in settings.items()]


def job_environment(resolved: ResolvedJob) -> list[dict[str, Any]]:
    """Variables for fields of the job: tokens, and the endpoint of an object store."""
    spec = resolved.job.spec
    wandb, hub = spec.tracking.wandb, spec.output.hub
    found = []
    if spec.model.token_secret_ref is not None:
        found.append(_secret_variable("HF_TOKEN", spec.model.token_secret_ref))
    if hub is not None and hub.token_secret_ref is not None:
        found.append(_secret_variable(HUB_TOKEN, hub.token_secret_ref))
    if wandb is not None and wandb.key_secret_ref is not None:
        found.append(_secret_variable("WANDB_API_KEY", wandb.key_secret_ref))
    if spec.dataset.credentials is not None and spec.dataset.credentials.endpoint:
        # boto3 and the AWS SDKs read the first variable, MosaicML streaming reads the second.
        found += [variable(n, spec.dataset.credentials.endpoint) for n in ("AWS_ENDPOINT_URL", "S3_ENDPOINT_URL")]
    return found


def credentials(resolved: ResolvedJob) -> list[dict[str, Any]]:
    """``envFrom`` with the Secret for the object store; empty without one."""
    given = resolved.job.spec.dataset.credentials
    return [{"secretRef": {"name": given.secret_name}}] if given is not None else []


def ray_token(resolved: ResolvedJob) -> list[dict[str, Any]]:
    """Variables with which the supervisor authenticates to Ray; KubeRay sets them in the Ray containers itself.

    KubeRay creates the Secret, with the name of the RayCluster, before the first pod.
    """
    token = SecretKeyRef(name=resolved.name, key="auth_token")
    return [variable("RAY_AUTH_MODE", "token"), _secret_variable("RAY_AUTH_TOKEN", token)]


def variable(name: str, value: str) -> dict[str, Any]:
    """A ``v1.EnvVar`` with a value."""
    return {"name": name, "value": value}


def _secret_variable(name: str, ref: SecretKeyRef) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": ref.name, "key": ref.key}}}
