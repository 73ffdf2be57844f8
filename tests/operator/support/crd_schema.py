"""Validation of objects by the schema of a CRD, as far as the API server enforces it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

KUBERAY = Path("github.com/ray-project/kuberay/ray-operator@v1.6.2/config/crd/bases")
_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": int | float}
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the file has a million characters


def kuberay_definition(plural: str) -> Path:
    """KubeRay's definition of a kind in the Go module cache, which `make cluster-build` fills."""
    cache = os.environ.get("GOMODCACHE") or Path(os.environ.get("GOPATH") or Path.home() / "go") / "pkg" / "mod"
    return Path(cache) / KUBERAY / f"ray.io_{plural}.yaml"


def schema_of(definition: Path, version: str) -> dict[str, Any]:
    """The schema of one version."""
    versions = yaml.load(definition.read_text(), Loader=_Loader)["spec"]["versions"]
    (found,) = [entry["schema"]["openAPIV3Schema"] for entry in versions if entry["name"] == version]
    return dict(found)


def violations(value: Any, schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Paths of unknown fields, missing fields and wrong types."""
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, int | str):
            yield f"{path}: not a number or text"
        return
    expected = _TYPES[schema["type"]]
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        yield f"{path}: not of type {schema['type']}"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from violations(item, schema["items"], f"{path}[{index}]")
    elif isinstance(value, dict):
        yield from _violations_of_fields(value, schema, path)


def _violations_of_fields(value: dict[str, Any], schema: dict[str, Any], path: str) -> Iterator[str]:
    yield from (f"{path}.{name}: missing" for name in schema.get("required", []) if name not in value)
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    if not known and not others:  # `metadata`, which the API server knows itself
        return
    for name, item in value.items():
        inner = known.get(name, others)
        if inner is None:
            yield f"{path}.{name}: unknown"
        else:
            yield from violations(item, inner, f"{path}.{name}")
