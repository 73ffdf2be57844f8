"""JSON schemas of Kubernetes and custom resources for kubeconform, made from pinned Go modules.

By default kubeconform downloads its schemas; here it gets folders. The schemas reject unknown fields at any depth, like
an API server with strict field validation.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spotune_testcluster.errors import ClusterError

LOCATION = "{{.Group}}_{{.ResourceKind}}_{{.ResourceAPIVersion}}.json"
"""Path of a kind in a folder. For kinds without a group, kubeconform uses the version instead."""
_DEFINITIONS = "definitions.json"
_TEXTS = ("description", "default", "example", "externalDocs")
_PROPERTIES = "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaProps"
_OF_PROPERTIES = {"$ref": f"#/definitions/{_PROPERTIES}"}
_MORE_THAN_ONE_TYPE = {
    "io.k8s.apimachinery.pkg.api.resource.Quantity": {"type": ["string", "number"]},
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString": {"type": ["string", "integer"]},
    f"{_PROPERTIES}OrArray": _OF_PROPERTIES,
    f"{_PROPERTIES}OrBool": {"anyOf": [_OF_PROPERTIES, {"type": "boolean"}]},
}
"""Types that the OpenAPI description of Kubernetes declares as a string only, or does not describe."""
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # KubeRay's file has a million characters


@dataclass(frozen=True)
class GoModule:
    """A Go module at a version, with its hash as in a go.sum."""

    path: str
    version: str
    digest: str

    def folder(self) -> Path:
        """Return the folder of its files, and download them if they are missing.

        Raises:
            ClusterError: The download failed, or the hash differs.
        """
        command = ["go", "mod", "download", "-json", f"{self.path}@{self.version}"]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
        if found.get("Sum") != self.digest or "Dir" not in found:
            raise ClusterError(f"{self.path}@{self.version}: {found.get('Error') or 'other files than those pinned'}")
        return Path(found["Dir"])


KUBERNETES = (
    GoModule("k8s.io/kubernetes", "v1.29.15", "h1:hLcyf3XmxtfkubCEmmPX5QVD7lDclXjvEUrJeP283LM="),
    GoModule("k8s.io/kubernetes", "v1.34.4", "h1:Yy6R4QB8C9kJPp25GFqEvX5XQwY5qzKeqD0Xx6oAcmk="),
    GoModule("k8s.io/kubernetes", "v1.36.3", "h1:qDQdoMiluAE2Eab6Fa52YV+WjiGz9mZFFoagEA6cI+o="),
)
"""The oldest version that the chart accepts (`kubeVersion`), that of the test cluster, and the newest; 20 MB each."""
PROMETHEUS_OPERATOR = GoModule(
    "github.com/prometheus-operator/prometheus-operator", "v0.85.0", "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s="
)
GATEWAY_API = GoModule("sigs.k8s.io/gateway-api", "v1.4.1", "h1:NPxFutNkKNa8UfLd2CMlEuhIPMQgDQ6DXNKG9sHbJU8=")
KARPENTER = GoModule("sigs.k8s.io/karpenter", "v1.8.0", "h1:AmTHUPtnuL8IX9mbcD3NOohyk62idrBCBtM+8Wn6Jvk=")


def write_kubernetes(source: GoModule, folder: Path) -> None:
    """Write the schemas of all kinds of a Kubernetes version."""
    described = json.loads((source.folder() / "api/openapi-spec/swagger.json").read_text())["definitions"]
    folder.mkdir(parents=True)
    definitions = {name: _strict(schema) for name, schema in described.items()} | _MORE_THAN_ONE_TYPE
    (folder / _DEFINITIONS).write_text(json.dumps({"definitions": definitions}))
    for name, schema in described.items():
        for kind in schema.get("x-kubernetes-group-version-kind", ()):
            _write(folder, kind, {"$ref": f"{_DEFINITIONS}#/definitions/{name}"})


def write_custom(definitions: Iterable[Path], folder: Path) -> None:
    """Write the schemas of custom resources from their definitions."""
    folder.mkdir(parents=True)
    documents = [each for path in definitions for each in yaml.load_all(path.read_text(), Loader=_Loader) if each]
    for spec in (document["spec"] for document in documents):
        for version in spec["versions"]:
            kind = {"group": spec["group"], "kind": spec["names"]["kind"], "version": version["name"]}
            _write(folder, kind, _of_custom(version["schema"]["openAPIV3Schema"]))


def _of_custom(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the fields that every object has, even if its definition does not name them."""
    everywhere = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}}
    found: dict[str, Any] = _strict(schema | {"properties": {**everywhere, **schema["properties"]}})
    return found


def _write(folder: Path, kind: dict[str, str], schema: dict[str, Any]) -> None:
    name = f"{kind['group'] or kind['version']}_{kind['kind'].lower()}_{kind['version']}.json"
    (folder / name).write_text(json.dumps(schema))


def _strict(schema: Any) -> Any:
    """Convert an OpenAPI schema to a JSON schema that rejects unknown fields."""
    if isinstance(schema, bool):  # of additionalProperties
        return schema
    found = {key: value for key, value in schema.items() if key not in _TEXTS}
    for key in ("items", "additionalProperties"):
        if key in found:
            found[key] = _strict(found[key])
    if "properties" in found:
        found["properties"] = {name: _strict(each) for name, each in found["properties"].items()}
        if not found.get("x-kubernetes-preserve-unknown-fields"):
            found.setdefault("additionalProperties", False)
    if found.get("nullable") and "type" in found:
        found["type"] = [found["type"], "null"]
    return found
