"""The application of a RayService: `import_path: spotune_serve.deployment.cluster:build` in its serveConfigV2.

Ray builds the application in a task on the head, which has neither the model's volume nor the file with the keys. So
nothing is read here: gateways and replicas read both in their own pods.

A node runs a gateway or a replica only if it offers the Ray resource for it, `spotune_gateway` or `spotune_replica`.
Clients must connect to Ray Serve's proxies on the nodes of the gateways: a connection ends with the process that holds
it, and replicas run on nodes that may be taken away.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator
from ray import serve

from spotune.custom_resource.base import Section, invalid
from spotune.errors import JobError
from spotune_serve.deployment.application import build_application
from spotune_serve.deployment.config import Placement, Scaling, ServiceConfig
from spotune_serve.deployment.hub import HubModel
from spotune_serve.gateway.settings import GatewaySettings

REPLICA_RESOURCE = "spotune_replica"
GATEWAY_RESOURCE = "spotune_gateway"
"""Names of the Ray resources. A node that offers 1 of a resource runs one such process."""

_REPOSITORY = re.compile(r"hf://([\w.-]+(?:/[\w.-]+)?)/?", re.ASCII)
"""A model on the Hub."""

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class ReplicasArguments(Section):
    """How many replicas run. With max above min, their number follows the load."""

    min: int = Field(default=1, ge=0)
    """Minimum number of replicas. 0: the service scales to zero."""
    max: Count = 1
    """Maximum number of replicas."""
    target_ongoing_requests: Seconds = 8.0
    """Sequences per replica that autoscaling aims at."""

    @model_validator(mode="after")
    def _check_min(self) -> Self:
        if self.min > self.max:
            invalid("min", f"{self.min} is more than max, {self.max}")
        return self


class ServingArguments(Section):
    """The arguments of the application, `args` in a serveConfigV2."""

    directory: str = Field(min_length=1)
    """Folder of the model in the pods of gateways and replicas, or hf://owner/name."""
    name: str = ""
    """Model id in the API. Empty: the job's name, or the folder's or repository's."""
    adapters: dict[str, str] = Field(default={})
    """Folders of LoRA adapters in the pods, by model id."""
    revision: str = Field(default="main", min_length=1)
    """With hf://: branch, tag or commit."""
    replicas: ReplicasArguments = ReplicasArguments()
    """How many replicas run."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs per replica. 0: replicas run on processors."""
    gateway_replicas: Count = 1
    """Number of gateways."""
    api_keys_file: str = ""
    """File with API keys in the pods of gateways, one key per line. Empty: no keys are needed."""
    request_timeout_seconds: Seconds = 600.0
    """Maximum duration of a request."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """Time that a leaving replica or gateway has to finish what it runs."""

    @model_validator(mode="after")
    def _check_repository(self) -> Self:
        if "://" in self.directory and not _REPOSITORY.fullmatch(self.directory):
            invalid("directory", f"{self.directory!r} is neither a folder nor hf://owner/name")
        return self


def build(args: dict[str, Any]) -> serve.Application:
    """The application of a RayService.

    Ray would validate a Pydantic model in place of the dictionary itself. Its error is a traceback; ours is one line,
    which fits into a status.

    Args:
        args: see `ServingArguments`.

    Raises:
        JobError: an argument is missing, unknown or wrong.
    """
    try:
        arguments = ServingArguments.model_validate(args)
    except ValidationError as error:
        problems = "; ".join(_text(problem) for problem in error.errors(include_url=False))
        raise JobError(f"the arguments of the Ray Serve application are wrong: {problems}") from error
    return build_application(service_config(arguments))


def service_config(arguments: ServingArguments) -> ServiceConfig:
    """What the arguments ask for: each gateway and each replica on a node with the resource for it."""
    model = _model(arguments.directory, arguments.revision)
    replicas = arguments.replicas
    return ServiceConfig(
        directory=model,
        name=arguments.name or (model.name if isinstance(model, HubModel) else ""),
        adapters={name: Path(folder) for name, folder in arguments.adapters.items()},
        scaling=Scaling(replicas.min, replicas.max, replicas.target_ongoing_requests),
        placement=Placement(
            gateways=arguments.gateway_replicas,
            gateway_resources={GATEWAY_RESOURCE: 1},
            replica_resources={REPLICA_RESOURCE: 1},
            max_per_node=1,
        ),
        gpus=arguments.gpus,
        drain_seconds=arguments.drain_seconds,
        gateway=GatewaySettings(request_timeout_seconds=arguments.request_timeout_seconds),
        api_keys_file=Path(arguments.api_keys_file) if arguments.api_keys_file else None,
    )


def _model(directory: str, revision: str) -> Path | HubModel:
    match = _REPOSITORY.fullmatch(directory)
    return HubModel(match[1], revision) if match else Path(directory)


def _text(problem: Any) -> str:
    """One validation error as text. The value is left out: it may be long."""
    place = ".".join(str(part) for part in (*problem["loc"], problem.get("ctx", {}).get("field", "")) if part != "")
    return f"{place}: {problem['msg']}"
