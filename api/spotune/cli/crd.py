"""`spotune crd`: the CustomResourceDefinition of FinetuneJobs as YAML or JSON."""

import json
from typing import Annotated, Any, Literal

import typer
import yaml

from spotune.crd.definition import custom_resource_definition

_HEADER = "# The FinetuneJob of spotune, made from its models by `spotune crd`: change those, not this.\n"
_LINE_LENGTH = 120


def crd(
    output: Annotated[Literal["yaml", "json"], typer.Option(help="Output format.")] = "yaml",
) -> None:
    """Print the CustomResourceDefinition of FinetuneJobs, with which the API server validates jobs.

    Example: spotune crd | kubectl apply --server-side --filename=-
    """
    definition = custom_resource_definition()
    typer.echo(json.dumps(definition, indent=2) if output == "json" else as_yaml(definition), nl=output == "json")


def as_yaml(definition: dict[str, Any]) -> str:
    """The definition in the format of the file ``manifests/crd.yaml``."""
    return _HEADER + yaml.dump(
        definition, Dumper=_WithoutAnchors, sort_keys=False, width=_LINE_LENGTH, allow_unicode=True
    )


class _WithoutAnchors(yaml.SafeDumper):
    """Writes repeated parts out instead of using YAML anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
