"""The arguments of the applications and the `user_config` of the gateway, as a serveConfigV2 has them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from spotune.custom_resource.base import Section, invalid
from spotune.errors import JobError
from spotune_serve.deployment.bucket import BucketModel
from spotune_serve.deployment.config import GatewayConfig, ModelConfig, Placement, VersionConfig
from spotune_serve.deployment.hub import HubModel, ModelSource
from spotune_serve.gateway.settings import GatewaySettings

REPLICA_RESOURCE: Final = "spotune_replica"
GATEWAY_RESOURCE: Final = "spotune_gateway"
"""Names of the Ray resources. A node that offers 1 of a resource runs one such process."""

_REPOSITORY = re.compile(r"hf://([\w.-]+(?:/[\w.-]+)?)/?", re.ASCII)
"""A model on the Hub."""
_PREFIX = re.compile(r"s3://([a-z0-9][a-z0-9.-]+)/([^/]+(?:/[^/]+)*)/?")
"""A model in a bucket."""
_DEFAULT_REVISION = "main"

_LINGER_SECONDS = 5.0

Seconds = Annotated[float, Field(gt=0)]
_Arguments = TypeVar("_Arguments", bound=Section)


class GatewayArguments(Section):
    """The arguments of the gateway's application."""

    name: str = Field(min_length=1)
    """Model id in the API."""
    api_keys_file: str = ""
    """File with API keys in the pods of gateways, one key per line. Empty: no keys are needed."""
    port: int = Field(default=8000, ge=1, le=65535)
    """TCP port of each gateway, in its pod."""
    request_timeout_seconds: Seconds = 600.0
    """Maximum duration of a request."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """Time that a leaving gateway has to finish its requests."""
    scales_to_zero: bool = False
    """Whether a request may wait for the start of the first replica."""


class _ModelLocation(Section):
    """Where a model and its adapters are."""

    directory: str = Field(min_length=1)
    """Folder of the model in the pods of gateways and replicas, hf://owner/name, or s3://bucket/prefix."""
    revision: str = ""
    """With hf://: branch, tag or commit. Empty: main."""
    step: int | None = None
    """With the export of a FinetuneJob: its step, so that a later export is not loaded in its place."""
    adapters: dict[str, str] = Field(default={})
    """Folders of LoRA adapters in the pods, by model id."""

    @model_validator(mode="after")
    def _check_repository(self) -> Self:
        if "://" in self.directory and isinstance(self.model, Path):
            invalid("directory", f"{self.directory!r} is neither a folder, nor hf://owner/name, nor s3://bucket/prefix")
        return self

    @property
    def model(self) -> ModelSource:
        """The model's folder, its repository on the Hub, or its prefix in a bucket."""
        if found := _REPOSITORY.fullmatch(self.directory):
            return HubModel(found[1], self.revision or _DEFAULT_REVISION)
        if found := _PREFIX.fullmatch(self.directory):
            return BucketModel(found[1], found[2])
        return Path(self.directory)

    @property
    def adapter_folders(self) -> dict[str, Path]:
        """The adapters' folders, by model id."""
        return {name: Path(folder) for name, folder in self.adapters.items()}


class ModelArguments(_ModelLocation):
    """The arguments of the application of one version of a model."""

    gpus: float = Field(default=0.0, ge=0)
    """GPUs per replica. 0: replicas run on processors."""
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    """Engine of the replicas. auto: vllm for causal models on GPUs where it is installed, else transformers."""
    batch_invariant: bool = False
    """With vllm: kernels whose results do not depend on the batch."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """Time that a leaving replica has to finish its sequences."""


class ListedVersion(_ModelLocation):
    """One version in the gateway's list."""

    application: str = Field(min_length=1)
    """Name of the application with its replicas."""
    version: str = Field(min_length=1)
    """Its name in `x-spotune-version`, `/stats` and metrics."""
    weight: float = Field(ge=0)
    """Its part of the requests, relative to the other weights. 0: only requests that name it."""


class GatewayUserConfig(Section):
    """The `user_config` of the deployment `Gateway`."""

    versions: list[ListedVersion] = Field(min_length=1)
    """The versions, in any order."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [each.version for each in self.versions]
        if len(set(names)) < len(names):
            invalid("versions", "two versions have the same name")
        return self


def gateway_config(args: Mapping[str, Any]) -> GatewayConfig:
    """The gateway that the arguments of its application ask for: each on a node with the resource for it.

    Raises:
        JobError: an argument is missing, unknown or wrong.
    """
    arguments = _validated(GatewayArguments, args, "the arguments of the gateway's application are wrong")
    return GatewayConfig(
        name=arguments.name,
        settings=GatewaySettings(request_timeout_seconds=arguments.request_timeout_seconds),
        api_keys_file=Path(arguments.api_keys_file) if arguments.api_keys_file else None,
        host="0.0.0.0",  # noqa: S104 - the NetworkPolicy restricts access
        port=arguments.port,
        linger_seconds=min(_LINGER_SECONDS, arguments.drain_seconds / 2),
        drain_seconds=arguments.drain_seconds,
        scales_to_zero=arguments.scales_to_zero,
        placement=Placement({GATEWAY_RESOURCE: 1}, max_per_node=1),
    )


def model_config(args: Mapping[str, Any]) -> ModelConfig:
    """The model that the arguments of its application ask for: each replica on a node with the resource for it.

    Raises:
        JobError: an argument is missing, unknown or wrong.
    """
    arguments = _validated(ModelArguments, args, "the arguments of the model's application are wrong")
    return ModelConfig(
        directory=arguments.model,
        step=arguments.step,
        adapters=arguments.adapter_folders,
        gpus=arguments.gpus,
        engine=arguments.engine,
        batch_invariant=arguments.batch_invariant,
        drain_seconds=arguments.drain_seconds,
        placement=Placement({REPLICA_RESOURCE: 1}, max_per_node=1),
    )


def version_configs(user_config: Mapping[str, Any]) -> list[VersionConfig]:
    """The versions of a gateway's `user_config`.

    Raises:
        JobError: a field is missing, unknown or wrong.
    """
    content = _validated(GatewayUserConfig, user_config, "the user_config of the gateway is wrong")
    return [
        VersionConfig(each.application, each.model, each.adapter_folders, each.version, each.weight, each.step)
        for each in content.versions
    ]


def _validated(kind: type[_Arguments], values: Mapping[str, Any], what: str) -> _Arguments:
    """The values, validated. Ray's own validation ends in a traceback; ours is one line, which fits into a status."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        problems = "; ".join(_text(problem) for problem in error.errors(include_url=False))
        raise JobError(f"{what}: {problems}") from error


def _text(problem: Any) -> str:
    """One validation error as text. The value is left out: it may be long."""
    place = ".".join(str(part) for part in (*problem["loc"], problem.get("ctx", {}).get("field", "")) if part != "")
    return f"{place}: {problem['msg']}"
