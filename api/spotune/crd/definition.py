"""The complete CustomResourceDefinitions: names, columns of ``kubectl get``, and the schemas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from spotune.crd.cel_rules import Rule
from spotune.crd.job_rules import JOB_RULES
from spotune.crd.service_rules import SERVICE_RULES
from spotune.crd.structural_schema import Schema, structural_schema, without_defaults
from spotune.crd.sweep_rules import SWEEP_RULES
from spotune.custom_resource import API_VERSION
from spotune.job import KIND, FinetuneJob
from spotune.service import SERVICE_KIND, ModelService
from spotune.sweep import SWEEP_KIND, FinetuneSweep

GROUP: Final = API_VERSION.partition("/")[0]
VERSION: Final = API_VERSION.partition("/")[2]
PLURAL: Final = "finetunejobs"
SHORT_NAME: Final = "ftj"
SERVICE_PLURAL: Final = "modelservices"
SERVICE_SHORT_NAME: Final = "ms"
SWEEP_PLURAL: Final = "finetunesweeps"
SWEEP_SHORT_NAME: Final = "ftsweep"


@dataclass(frozen=True)
class Column:
    """A column of ``kubectl get``.

    Attributes:
        name: Title.
        type: OpenAPI type of the values.
        path: JSON path of the field.
        wide: Whether only ``kubectl get --output wide`` shows it.
    """

    name: str
    type: str
    path: str
    wide: bool = False

    def as_json(self) -> dict[str, Any]:
        """The column as it appears in the CustomResourceDefinition."""
        return {"name": self.name, "type": self.type, "jsonPath": self.path} | ({"priority": 1} if self.wide else {})


@dataclass(frozen=True)
class CustomResource:
    """A kind of custom resource.

    Attributes:
        kind: Kind of the objects.
        model: Pydantic model of the objects.
        rules: CEL rules by section of the model.
        plural: Name in URLs.
        short_name: Name for ``kubectl``.
        columns: Columns of ``kubectl get``.
    """

    kind: str
    model: type[BaseModel]
    rules: Mapping[type[BaseModel], Sequence[Rule]]
    plural: str
    short_name: str
    columns: Sequence[Column]


_AGE: Final = Column("Age", "date", ".metadata.creationTimestamp")

FINETUNE_JOBS: Final = CustomResource(
    kind=KIND,
    model=FinetuneJob,
    rules=JOB_RULES,
    plural=PLURAL,
    short_name=SHORT_NAME,
    columns=(
        Column("Phase", "string", ".status.phase"),
        Column("Step", "integer", ".status.step"),
        Column("Loss", "number", ".status.loss"),
        Column("ETA", "string", ".status.eta"),
        Column("Workers", "string", ".status.workers"),
        Column("Restarts", "integer", ".status.restarts.total"),
        Column("Checkpoint", "integer", ".status.lastCheckpoint.step"),
        _AGE,
    ),
)
MODEL_SERVICES: Final = CustomResource(
    kind=SERVICE_KIND,
    model=ModelService,
    rules=SERVICE_RULES,
    plural=SERVICE_PLURAL,
    short_name=SERVICE_SHORT_NAME,
    columns=(
        Column("Phase", "string", ".status.phase"),
        Column("Replicas", "string", ".status.replicas"),
        Column("Model", "string", ".status.model.version"),
        Column("Requests/s", "number", ".status.requestsPerSecond"),
        Column("First token (ms)", "integer", ".status.firstTokenMillisecondsP50"),
        Column("URL", "string", ".status.url"),
        _AGE,
        Column("Location", "string", ".status.model.location", wide=True),
        Column("RayService", "string", ".status.rayService", wide=True),
        Column("Image", "string", ".status.image", wide=True),
    ),
)
FINETUNE_SWEEPS: Final = CustomResource(
    kind=SWEEP_KIND,
    model=FinetuneSweep,
    rules=SWEEP_RULES,
    plural=SWEEP_PLURAL,
    short_name=SWEEP_SHORT_NAME,
    columns=(
        Column("Phase", "string", ".status.phase"),
        Column("Running", "integer", ".status.counts.running"),
        Column("Complete", "integer", ".status.counts.complete"),
        Column("Pruned", "integer", ".status.counts.pruned"),
        Column("Failed", "integer", ".status.counts.failed"),
        Column("Waiting", "integer", ".status.counts.waiting"),
        Column("Best", "string", ".status.best.name"),
        Column("Value", "number", ".status.best.value"),
        Column("GPU hours", "number", ".status.gpuHours"),
        _AGE,
    ),
)
CUSTOM_RESOURCES: Final = (FINETUNE_JOBS, MODEL_SERVICES, FINETUNE_SWEEPS)
"""All kinds that spotune defines."""


def custom_resource_definition(resource: CustomResource = FINETUNE_JOBS) -> dict[str, Any]:
    """The CustomResourceDefinition (apiextensions.k8s.io/v1) of a kind."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [column.as_json() for column in resource.columns],
        "schema": {"openAPIV3Schema": _schema(resource)},
    }
    names = {
        "kind": resource.kind,
        "listKind": f"{resource.kind}List",
        "singular": resource.kind.lower(),
        "plural": resource.plural,
        "shortNames": [resource.short_name],
        "categories": ["all"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource.plural}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def custom_resource_definitions() -> list[dict[str, Any]]:
    """The CustomResourceDefinitions of all kinds that spotune defines."""
    return [custom_resource_definition(resource) for resource in CUSTOM_RESOURCES]


def _schema(resource: CustomResource) -> Schema:
    """The schema of an object. Kubernetes defines its metadata, and only the operator writes its status.

    The default status has observedGeneration -1, so a new object counts as not yet reconciled. kstatus (used by Flux)
    takes an object without a status as ready.
    """
    schema = structural_schema(resource.model, resource.rules)
    fields = schema["properties"]
    type_meta = {
        name: {"description": fields[name]["description"], "type": "string"} for name in ("apiVersion", "kind")
    }
    return schema | {
        "required": ["spec"],
        "properties": type_meta
        | {
            "metadata": {"type": "object"},
            "spec": fields["spec"],
            "status": without_defaults(fields["status"]) | {"default": {"observedGeneration": -1}},
        },
    }
