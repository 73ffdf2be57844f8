"""`spotune render` and `spotune operator`. Imports of the operator happen when they run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import yaml

if TYPE_CHECKING:
    from spotune.job import FinetuneJob


def render(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="Job file.")],
    provider: Annotated[
        Literal["aks", "gke", "eks", "none"] | None,
        typer.Option(help="Overrides cluster.provider. auto means none here, because no cluster is queried."),
    ] = None,
    image: Annotated[str | None, typer.Option(help="Trainer image. Overrides cluster.image.")] = None,
    storage_class: Annotated[
        str | None, typer.Option(help="StorageClass of the shared volume. Overrides storage.storageClassName.")
    ] = None,
    output: Annotated[Literal["yaml", "json"], typer.Option(help="YAML documents, or one List as JSON.")] = "yaml",
) -> None:
    """Print the Kubernetes objects that the operator would apply for a job. It needs no cluster.

    The output is for a job that has passed preflight, without owner references. It has no workers if the data still has
    to be prepared (dataset.prepare), and no on-demand workers.

    Example: spotune render job.yaml --provider aks | kubectl apply --dry-run=server --filename -
    """
    from spotune_operator.children import build_children
    from spotune_operator.children.raycluster import Replicas
    from spotune_operator.children.resolved_job import resolve
    from spotune_operator.providers import PROVIDERS, ProviderName

    changes = {
        "spec.cluster.provider": provider,
        "spec.cluster.image": image,
        "spec.storage.storageClassName": storage_class,
    }
    parsed = _read(job, {path: value for path, value in changes.items() if value is not None})
    provider_name = parsed.spec.cluster.provider
    resolved = resolve(parsed, PROVIDERS[ProviderName.NONE if provider_name == "auto" else ProviderName(provider_name)])
    workers = 0 if parsed.spec.dataset.prepare is not None else parsed.spec.workers.count
    children = build_children(resolved, Replicas(workers))
    typer.echo(as_yaml(children) if output == "yaml" else _as_json(children), nl=False)


def _read(file: Path, changes: dict[str, Any]) -> FinetuneJob:
    """Load a job file and apply the command line's options."""
    from spotune.job_file.load import load_job, replace_fields

    return replace_fields(load_job(file), changes)


def operator() -> None:
    """Run the operator: watch FinetuneJobs and manage their Ray clusters, until SIGTERM.

    In a pod it uses the pod's service account, elsewhere KUBECONFIG. Settings are environment variables such as
    SPOTUNE_OPERATOR_IMAGE; an unknown name is an error that lists all of them. Probes and metrics are served on :8080
    (/livez, /readyz, /metrics).

    Example: SPOTUNE_OPERATOR_WATCH_NAMESPACES=team spotune operator
    """
    from spotune_operator.main import run
    from spotune_operator.settings import Settings

    run(Settings.from_environment())


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as blocks, and never uses aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True, so that repeated parts are written out."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def as_yaml(objects: Iterable[dict[str, Any]]) -> str:
    """Manifests as YAML documents, with fields in insertion order and the innermost collections on one line."""
    return yaml.dump_all(
        objects, Dumper=_Dumper, sort_keys=False, explicit_start=True, default_flow_style=None, width=120
    )


def _as_json(objects: list[dict[str, Any]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2) + "\n"
