"""Environment variables of all containers."""

from collections.abc import Mapping
from typing import Any, Final

from spotune.custom_resource.base import SecretKeyRef

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
    return variables(settings)


def variables(settings: Mapping[str, str]) -> list[dict[str, Any]]:
    """``v1.EnvVar``s with values."""
    return [variable(name, value) for name, value in settings.items()]


def variable(name: str, value: str) -> dict[str, Any]:
    """A ``v1.EnvVar`` with a value."""
    return {"name": name, "value": value}


def secret_variable(name: str, ref: SecretKeyRef) -> dict[str, Any]:
    """A ``v1.EnvVar`` with the value of a key of a Secret."""
    return {"name": name, "valueFrom": secret_source(ref)}


def secret_source(ref: SecretKeyRef) -> dict[str, Any]:
    """A ``v1.EnvVarSource`` for a key of a Secret."""
    return {"secretKeyRef": {"name": ref.name, "key": ref.key}}
