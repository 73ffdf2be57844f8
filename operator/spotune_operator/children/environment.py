"""Environment variables of a job's containers: its Secrets, and Ray's token."""

from typing import Any, Final

from spotune.custom_resource.base import SecretKeyRef
from spotune.job import CredentialsSpec
from spotune.job.output import HUB_TOKEN
from spotune.job.training.code_source import CONFIG_MAP_FOLDER, GIT_TOKEN
from spotune_operator.children.pod_template.environment import secret_variable, variable
from spotune_operator.children.resolved_job import ResolvedJob

CODE_FOLDER: Final = "/etc/spotune-code"
"""Mount path of the ConfigMap of `training.codeFrom.configMap`."""


def job_environment(resolved: ResolvedJob) -> list[dict[str, Any]]:
    """Variables for fields of the job: tokens, and the endpoint of an object store."""
    spec = resolved.job.spec
    wandb, hub = spec.tracking.wandb, spec.output.hub
    found = []
    if spec.given_model is not None and spec.given_model.token_secret_ref is not None:
        found.append(secret_variable("HF_TOKEN", spec.given_model.token_secret_ref))
    if hub is not None and hub.token_secret_ref is not None:
        found.append(secret_variable(HUB_TOKEN, hub.token_secret_ref))
    if wandb is not None and wandb.key_secret_ref is not None:
        found.append(secret_variable("WANDB_API_KEY", wandb.key_secret_ref))
    endpoint = next((given.endpoint for given in _given_credentials(resolved) if given.endpoint), "")
    if endpoint:
        # boto3 and the AWS SDKs read the first variable, MosaicML streaming reads the second.
        found += [variable(name, endpoint) for name in ("AWS_ENDPOINT_URL", "S3_ENDPOINT_URL")]
    return found


def code_environment(resolved: ResolvedJob) -> list[dict[str, Any]]:
    """Variables of the head alone, which reads the code of the user: the token of git, and where the ConfigMap is."""
    code_from = resolved.job.spec.training.code_from
    if code_from is None:
        return []
    found = []
    if code_from.git is not None and code_from.git.token_secret_ref is not None:
        found.append(secret_variable(GIT_TOKEN, code_from.git.token_secret_ref))
    if code_from.config_map is not None:
        found.append(variable(CONFIG_MAP_FOLDER, CODE_FOLDER))
    return found


def credentials(resolved: ResolvedJob) -> list[dict[str, Any]]:
    """``envFrom`` with the Secrets for object stores, of the data and of the job's state; empty without any."""
    names = dict.fromkeys(given.secret_name for given in _given_credentials(resolved))
    return [{"secretRef": {"name": name}} for name in names]


def ray_token(resolved: ResolvedJob) -> list[dict[str, Any]]:
    """Variables with which the supervisor authenticates to Ray; KubeRay sets them in the Ray containers itself.

    KubeRay creates the Secret, with the name of the RayCluster, before the first pod.
    """
    token = SecretKeyRef(name=resolved.name, key="auth_token")
    return [variable("RAY_AUTH_MODE", "token"), secret_variable("RAY_AUTH_TOKEN", token)]


def _given_credentials(resolved: ResolvedJob) -> list[CredentialsSpec]:
    spec = resolved.job.spec
    of_data = spec.given_dataset.credentials if spec.given_dataset is not None else None
    return [given for given in (of_data, spec.storage.credentials) if given is not None]
