"""Resolved services for tests, and accessors of their children."""

from dataclasses import replace
from typing import Any

import yaml

from spotune.service import ModelService
from spotune_operator.children.serving import build_service_children
from spotune_operator.children.serving.resolved_service import (
    ModelLocation,
    ResolvedService,
    only_version,
    resolve_service,
)
from spotune_operator.providers import NONE, Provider

TRAINED = ModelLocation(claim="spotune-job", path="team/job-01234567/export", version="job-01234567-step-9")
HUB = ModelLocation(source="hf://google-t5/t5-small", version="v1")
BUCKET = ModelLocation(source="s3://models/team/llama", version="team/llama")


def a_service(name: str = "answers", **spec: Any) -> ModelService:
    """A small service of a trained job on processors, with parts of its spec replaced."""
    content = {"model": {"finetuneJob": "job"}, "gpus": 0} | spec
    body = {"metadata": {"name": name, "namespace": "team"}, "spec": content}
    return ModelService.model_validate(body, by_alias=True, by_name=False)


def resolved_service_of(
    provider: Provider = NONE,
    *,
    name: str = "answers",
    location: ModelLocation = TRAINED,
    adapters: dict[str, ModelLocation] | None = None,
    options: dict[str, Any] | None = None,
    task: str = "",
    **spec: Any,
) -> ResolvedService:
    """A resolved service of the model at `location`.

    `adapters` are locations by model id, `options` those of `resolve_service`, `task` that of the model, and `spec`
    replaces parts of the spec.
    """
    if location.source:
        spec = {"model": {"source": location.source}} | spec
    service = a_service(name, **spec)
    version = replace(only_version(service, location, adapters or {}), task=task)
    return resolve_service(service, provider, versions=[version], **(options or {}))


def child(resolved: ResolvedService, kind: str, name: str = "") -> dict[str, Any]:
    """The only child of a kind, or that with this name."""
    found = [
        each
        for each in build_service_children(resolved)
        if each["kind"] == kind and (not name or each["metadata"]["name"] == name)
    ]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]


def cluster(resolved: ResolvedService) -> dict[str, Any]:
    """The spec of the RayCluster."""
    config: dict[str, Any] = child(resolved, "RayService")["spec"]["rayClusterConfig"]
    return config


def groups(resolved: ResolvedService) -> dict[str, dict[str, Any]]:
    """The worker groups by name."""
    return {group["groupName"]: group for group in cluster(resolved)["workerGroupSpecs"]}


def templates(resolved: ResolvedService) -> dict[str, dict[str, Any]]:
    """The pod templates by group; that of the head is `head`."""
    workers = {name: group["template"] for name, group in groups(resolved).items()}
    return {"head": cluster(resolved)["headGroupSpec"]["template"], **workers}


def pods(resolved: ResolvedService) -> dict[str, dict[str, Any]]:
    """The pod specs by group; that of the head is `head`."""
    return {name: template["spec"] for name, template in templates(resolved).items()}


def serve_content(resolved: ResolvedService) -> dict[str, Any]:
    """The content of serveConfigV2."""
    content: dict[str, Any] = yaml.safe_load(child(resolved, "RayService")["spec"]["serveConfigV2"])
    return content


def gateway_application(resolved: ResolvedService) -> dict[str, Any]:
    """The application of the gateway in serveConfigV2."""
    return dict(serve_content(resolved)["applications"][0])


def model_application(resolved: ResolvedService) -> dict[str, Any]:
    """The only application of a version in serveConfigV2."""
    _, found = serve_content(resolved)["applications"]
    return dict(found)
