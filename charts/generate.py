"""Generates the chart's values.schema.json, README.md and CRDs from values.yaml and manifests/crd.yaml.

    python charts/generate.py

Each value is documented by a comment above it that starts with `# -- `. A mapping with such a comment accepts any keys.
All other mappings are closed, so `helm install` rejects a misspelt name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from spotune.units.money import Price
from spotune_operator.notifications.targets import ALL, PHASES
from spotune_operator.settings import GpuHealing, Settings

CHART = Path(__file__).parent / "spotune"
DEFINITIONS = Path(__file__).parent.parent / "manifests/crd.yaml"
_OF_THE_CHART = {
    *("image", "ray_version", "serving", "serve_image", "serve_vllm_image", "prices"),
    *("namespace", "monitoring_namespace", "watch_namespaces", "notifications", "host", "port"),
}
"""Settings that the templates set or depend on."""
_NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
_PRICE = {"type": "string", "pattern": Price.PATTERN}
_OBJECTS = {"type": "array", "items": {"type": "object"}}
_STEPS = ("cordon", "restart_device_plugin", "drain", "delete_node")

README = """# Chart values

The Helm chart installs the operator and the CustomResourceDefinitions (CRDs) of FinetuneJobs,
FinetuneSweeps and ModelServices.

```console
$ helm install spotune charts/spotune --namespace spotune-system \\
    --create-namespace --wait \\
    --set-string image.repository=REGISTRY/spotune/operator \\
    --set-string trainer.image=REGISTRY/spotune/trainer:0.1.0
```

There are no published images yet: [build them](../../docs/quick-start/README.md#images). On a cloud
add `--values charts/spotune/values-aks.yaml` (`-gke`, `-eks`): it keeps the operator off spot
nodes.

| command | what it does to running jobs |
|---|---|
| `helm upgrade`, `helm rollback` | nothing: they replace the operator and the CRDs |
| `helm uninstall` | nothing: CRDs, jobs and volumes stay, and training continues |

This page is generated from `values.yaml` (`make manifests`).

| value | default | what it means |
|---|---|---|
"""


@dataclass(frozen=True)
class Value:
    """A documented value.

    Attributes:
        path: Dotted path in the file.
        default: Default value.
        text: Description in Markdown.
    """

    path: str
    default: Any
    text: str


def documented(text: str) -> Iterator[Value]:
    """Yield the values of a file in order.

    Raises:
        ValueError: A value has no comment.
    """
    lines = text.splitlines()
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    yield from _below(root, "", lines)


def _below(node: yaml.MappingNode, path: str, lines: list[str]) -> Iterator[Value]:
    for key, value in node.value:
        name = f"{path}{key.value}"
        comment = lines[key.start_mark.line - 1].strip()
        if comment.startswith("# -- "):
            yield Value(name, yaml.safe_load(yaml.serialize(value)), comment.removeprefix("# -- "))
        elif isinstance(value, yaml.MappingNode):
            yield from _below(value, f"{name}.", lines)
        else:
            raise ValueError(f"{name} has no comment that begins with '# -- '")


def schema(values: list[Value]) -> dict[str, Any]:
    """The JSON schema of a values file."""
    root: dict[str, Any] = {"$schema": "http://json-schema.org/draft-07/schema#", **_closed()}
    root["properties"]["global"] = {"type": "object"}  # Helm passes it to every chart
    for value in values:
        node = root
        *sections, name = value.path.split(".")
        for section in sections:
            node = node["properties"].setdefault(section, _closed())
        node["properties"][name] = {"description": value.text, **(_SHAPES.get(value.path) or _shape(value.default))}
    return root


def _closed() -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": {}}


def _shape(default: Any) -> dict[str, Any]:
    match default:
        case bool():
            return {"type": "boolean"}
        case str():
            return {"type": "string"}
        case dict():
            return {"type": "object"}
    raise ValueError(f"no shape for {default!r}")


def _settings() -> dict[str, Any]:
    """The schema of the operator settings that users may set."""
    users = [item for item in fields(Settings) if item.name not in {*_OF_THE_CHART, "healing"}]
    found = {item.name: item.default for item in users}
    found |= {f"heal_{item.name}": item.default for item in fields(GpuHealing) if item.name not in _STEPS}
    kinds = {
        bool: {"type": "boolean"},
        int: {"type": "integer", "minimum": 0},
        float: {"type": "number", "minimum": 0},
        str: {"type": "string", "pattern": "^[A-Z]{3}$"},  # the currency
    }
    return _closed() | {"properties": {_camel(name): kinds[type(default)] for name, default in found.items()}}


def _camel(name: str) -> str:
    return re.sub(r"_([a-z])", lambda found: found[1].upper(), name)


_PORTS = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 65535}}
_NOTIFICATIONS = {
    "type": "array",
    "items": _closed()
    | {
        "required": ["secretRef"],
        "properties": {
            "secretRef": _closed()
            | {"properties": {"name": {"type": "string"}, "key": {"type": "string"}}, "required": ["name", "key"]},
            "format": {"enum": ["json", "slack"]},
            "phases": {"type": "array", "items": {"enum": [ALL, *sorted(PHASES)]}},
            "namespaces": {"type": "array", "items": _NAME},
        },
    },
}

_SHAPES: dict[str, dict[str, Any]] = {
    "image.digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "imagePullSecrets": {"type": "array", "items": _closed() | {"properties": {"name": _NAME}, "required": ["name"]}},
    "watchNamespaces": {"type": "array", "uniqueItems": True, "items": _NAME},
    "settings": _settings(),
    "prices": {
        "type": "array",
        "items": _closed()
        | {
            "properties": {
                "labels": _STRINGS,
                "price": _PRICE,
                "onDemandPrice": _PRICE,
                "source": {"type": "string"},
                "date": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
            },
            "required": ["price", "source", "date"],
        },
    },
    "serviceAccount.annotations": _STRINGS,
    "networkPolicy.apiServerPorts": _PORTS,
    "networkPolicy.apiServerCIDRs": {"type": "array", "items": {"type": "string", "pattern": "/[0-9]+$"}},
    "networkPolicy.notificationPorts": _PORTS,
    "notifications": _NOTIFICATIONS,
    "policies.actions": {"type": "array", "minItems": 1, "items": {"enum": ["Deny", "Warn", "Audit"]}},
    "policies.namespaceSelector": {"type": "object"},
    "policies.imagePrefixes": {"type": "array", "items": {"type": "string", "pattern": "^[^,]+/$"}},
    "policies.nodeSelectors": {"type": "array", "items": {"type": "string", "pattern": "^[^=,]+=[^=,]+$"}},
    "policies.maxWorkers": {"type": "integer", "minimum": 0},
    "policies.maxGpuHours": {"type": "number", "minimum": 0},
    "policies.maxCost": {"type": "string", "pattern": "^([0-9]+([.][0-9]+)? [A-Z]{3})?$"},
    "monitoring.labels": _STRINGS,
    "monitoring.dashboardLabels": _STRINGS,
    "podAnnotations": _STRINGS,
    "podLabels": _STRINGS,
    "nodeSelector": _STRINGS,
    "tolerations": _OBJECTS,
}
"""Schemas of values whose default does not determine the type."""


def files(chart: Path = CHART) -> dict[Path, str]:
    """The generated files for the chart or a copy of it, by path."""
    values = list(documented((chart / "values.yaml").read_text(encoding="utf-8")))
    rows = (f"| `{each.path}` | `{json.dumps(each.default)}` | {each.text} |\n" for each in values)
    return {
        chart / "values.schema.json": json.dumps(schema(values), indent=2) + "\n",
        chart / "README.md": README + "".join(rows),
        chart / "files/crd.yaml": DEFINITIONS.read_text(encoding="utf-8"),
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
