"""Environment variables of the containers: the Secrets that a job names, and where programs may write."""

from typing import Any, Final

from spotune.job.base import SecretKeyRef
from spotune_operator.children.resolved_job import PlacedJob

CACHE: Final = "/cache"
"""Where the emptyDir is mounted that holds model and shard caches; it outlives the restart of a container."""


def default_environment() -> list[dict[str, Any]]:
    """Variables that a pod template may set otherwise."""
    settings = {
        "HOME": CACHE,  # the uid of the pod need not be known to the image
        "USER": "spotune",  # PyTorch asks for a name
        "SPOTUNE_CACHE": f"{CACHE}/spotune",
        "PYTHONUNBUFFERED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return [variable(name, value) for name, value in settings.items()]


def job_environment(placed: PlacedJob) -> list[dict[str, Any]]:
    """Variables that the job asks for by its fields: tokens, and the address of an object store."""
    spec = placed.job.spec
    wandb, hub = spec.tracking.wandb, spec.output.hub
    found = []
    if spec.model.token_secret_ref is not None:
        found.append(_secret_variable("HF_TOKEN", spec.model.token_secret_ref))
    if hub is not None and hub.token_secret_ref is not None:
        found.append(_secret_variable("SPOTUNE_HUB_TOKEN", hub.token_secret_ref))
    if wandb is not None and wandb.key_secret_ref is not None:
        found.append(_secret_variable("WANDB_API_KEY", wandb.key_secret_ref))
    if spec.dataset.credentials is not None and spec.dataset.credentials.endpoint:
        # boto3 and the AWS SDKs read the first, MosaicML streaming the second.
        found += [variable(n, spec.dataset.credentials.endpoint) for n in ("AWS_ENDPOINT_URL", "S3_ENDPOINT_URL")]
    return found


def credentials(placed: PlacedJob) -> list[dict[str, Any]]:
    """``envFrom``: the Secret with access to the object store, if the job names one."""
    given = placed.job.spec.dataset.credentials
    return [{"secretRef": {"name": given.secret_name}}] if given is not None else []


def ray_token(placed: PlacedJob) -> list[dict[str, Any]]:
    """What a container of ours needs to speak to Ray; KubeRay gives it to the Ray containers itself.

    The Secret is KubeRay's, named as the RayCluster. It is there before the first pod is.
    """
    token = SecretKeyRef(name=placed.name, key="auth_token")
    return [variable("RAY_AUTH_MODE", "token"), _secret_variable("RAY_AUTH_TOKEN", token)]


def variable(name: str, value: str) -> dict[str, Any]:
    """A ``v1.EnvVar`` with a value."""
    return {"name": name, "value": value}


def _secret_variable(name: str, ref: SecretKeyRef) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": ref.name, "key": ref.key}}}
