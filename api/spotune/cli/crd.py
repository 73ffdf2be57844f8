"""`spotune crd`: the definition of FinetuneJobs for a cluster, as YAML or JSON."""

import json
from typing import Annotated, Any, Literal

import typer
import yaml

from spotune.crd.definition import custom_resource_definition

_HEADER = "# The FinetuneJob of spotune, made from its models by `spotune crd`: change those, not this.\n"
_LINE_LENGTH = 120


def crd(
    output: Annotated[Literal["yaml", "json"], typer.Option(help="How the definition is printed.")] = "yaml",
) -> None:
    """Print the CustomResourceDefinition of FinetuneJobs, which the API server checks every job by.

    Example: spotune crd | kubectl apply --server-side --filename=-
    """
    definition = custom_resource_definition()
    typer.echo(json.dumps(definition, indent=2) if output == "json" else as_yaml(definition), nl=output == "json")


def as_yaml(definition: dict[str, Any]) -> str:
    """The definition as the file ``manifests/crd.yaml`` holds it."""
    return _HEADER + yaml.dump(
        definition, Dumper=_WithoutAnchors, sort_keys=False, width=_LINE_LENGTH, allow_unicode=True
    )


class _WithoutAnchors(yaml.SafeDumper):
    """Writes out what occurs twice: an anchor says nothing to a reader."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
