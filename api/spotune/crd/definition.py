"""The complete CustomResourceDefinition: names, columns of ``kubectl get``, and the schema."""

from typing import Any, Final

from spotune.crd.cel_rules import RULES
from spotune.crd.structural_schema import Schema, structural_schema, without_defaults
from spotune.job import API_VERSION, KIND, FinetuneJob

GROUP: Final = API_VERSION.partition("/")[0]
VERSION: Final = API_VERSION.partition("/")[2]
SINGULAR: Final = "finetunejob"
PLURAL: Final = "finetunejobs"
SHORT_NAME: Final = "ftj"

_COLUMNS: Final = (
    ("Phase", "string", ".status.phase"),
    ("Step", "integer", ".status.step"),
    ("Loss", "number", ".status.loss"),
    ("ETA", "string", ".status.eta"),
    ("Workers", "string", ".status.workers"),
    ("Restarts", "integer", ".status.restarts.total"),
    ("Checkpoint", "integer", ".status.lastCheckpoint.step"),
    ("Age", "date", ".metadata.creationTimestamp"),
)
"""Name, type and JSON path of the columns of ``kubectl get``."""


def custom_resource_definition() -> dict[str, Any]:
    """The CustomResourceDefinition (apiextensions.k8s.io/v1) of FinetuneJobs."""
    schema = _schema()
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [{"name": name, "type": kind, "jsonPath": path} for name, kind, path in _COLUMNS],
        "schema": {"openAPIV3Schema": schema},
    }
    names = {
        "kind": KIND,
        "listKind": f"{KIND}List",
        "singular": SINGULAR,
        "plural": PLURAL,
        "shortNames": [SHORT_NAME],
        "categories": ["all"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def _schema() -> Schema:
    """The schema of a job. Kubernetes defines its metadata, and only the operator writes its status.

    The default status has observedGeneration -1, so a new job counts as not yet reconciled. kstatus (used by Flux)
    takes an object without a status as ready.
    """
    schema = structural_schema(FinetuneJob, RULES)
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
