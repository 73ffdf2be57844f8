"""Every pod that spotune makes or asks KubeRay for, from committed files: the chart, and golden files of children."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from spotune_client.cluster.volume_pod import volume_pod_manifest
from spotune_operator.cli.doctor.image import probe_pod
from tests import ROOT

INSTALL = ROOT / "manifests/install.yaml"
CHILDREN = sorted(
    path
    for folder in ("reconcile/golden", "children/serving/golden")
    for path in (ROOT / "tests/operator" / folder).glob("*.yaml")
)
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class RenderedPod:
    """A pod template.

    Attributes:
        place: file, kind and name of the object, and path of the template in it.
        template: `metadata` and `spec`.
    """

    place: str
    template: dict[str, Any]

    @property
    def spec(self) -> dict[str, Any]:
        """The spec of the pod."""
        found: dict[str, Any] = self.template["spec"]
        return found

    @property
    def containers(self) -> list[dict[str, Any]]:
        """All containers, with those that run before and beside them."""
        return [each for kind in ("initContainers", "containers") for each in self.spec.get(kind) or ()]

    def as_pod(self, name: str) -> dict[str, Any]:
        """The pod that a controller makes of it. What KubeRay adds is in no container's security context."""
        labels = {"app.kubernetes.io/part-of": "spotune"}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": self.spec}


def pods_in(value: Any, place: str) -> Iterator[RenderedPod]:
    """All pod templates in an object, wherever they are."""
    if isinstance(value, dict):
        spec = value.get("spec")
        if isinstance(spec, dict) and isinstance(spec.get("containers"), list):
            yield RenderedPod(place, value)
            return
        for key, item in value.items():
            yield from pods_in(item, f"{place}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from pods_in(item, f"{place}[{index}]")


def objects_in(text: str) -> list[dict[str, Any]]:
    """The objects of a YAML file; golden files may hold lists of them."""
    documents = [each for each in yaml.load_all(text, Loader=_Loader) if each]
    return [item for each in documents for item in (each if isinstance(each, list) else [each])]


@cache
def rendered_pods() -> tuple[RenderedPod, ...]:
    """All pods, each different template once."""
    found: dict[str, RenderedPod] = {}
    for path in (INSTALL, *CHILDREN):
        for item in objects_in(path.read_text()):
            for pod in pods_in(item, _place(path, item)):
                found.setdefault(repr(pod.template), pod)
    return tuple(found.values())


def command_pods() -> tuple[RenderedPod, ...]:
    """The pods that commands make: `spotune doctor --image`, and the one that reads a volume."""
    head = next(pod for pod in rendered_pods() if "RayCluster" in pod.place and "headGroupSpec" in pod.place)
    job = {"metadata": {"name": "sql", "namespace": "team", "uid": "u"}, "status": {}}
    reader = volume_pod_manifest(job, "logs", ["true"], 60, lambda _job: head.template)
    return RenderedPod("spotune doctor", probe_pod("image:1", "team")), RenderedPod("spotune logs", reader)


def _place(path: Path, item: dict[str, Any]) -> str:
    return f"{path.relative_to(ROOT)}: {item.get('kind')} {(item.get('metadata') or {}).get('name')}"
