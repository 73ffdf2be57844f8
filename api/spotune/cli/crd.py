"""`spotune crd`: the CustomResourceDefinitions of spotune as YAML or JSON."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer
import yaml

from spotune.crd.definition import custom_resource_definitions

_HEADER = "# The custom resources of spotune, made from their models by `spotune crd`: change those, not this.\n"
_LINE_LENGTH = 120


def crd(
    output: Annotated[Literal["yaml", "json"], typer.Option(help="Output format.")] = "yaml",
) -> None:
    """Print the CustomResourceDefinitions, with which the API server validates objects of all kinds.

    Example: spotune crd | kubectl apply --server-side --filename=-
    """
    definitions = custom_resource_definitions()
    typer.echo(as_json(definitions) if output == "json" else as_yaml(definitions), nl=output == "json")


def as_json(definitions: Sequence[dict[str, Any]]) -> str:
    """The definitions as one object for ``kubectl apply``, which takes no JSON list."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": definitions}, indent=2)


def as_yaml(definitions: Sequence[dict[str, Any]]) -> str:
    """The definitions in the format of the file ``manifests/crd.yaml``: one document each."""
    return _HEADER + "---\n".join(
        yaml.dump(definition, Dumper=_WithoutAnchors, sort_keys=False, width=_LINE_LENGTH, allow_unicode=True)
        for definition in definitions
    )


class _WithoutAnchors(yaml.SafeDumper):
    """Writes repeated parts out instead of using YAML anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
