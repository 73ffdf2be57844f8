"""The operator's commands of `spotune`, named by the entry points in pyproject.toml. Light at import."""

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
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job.")],
    provider: Annotated[
        Literal["aks", "gke", "eks", "none"] | None,
        typer.Option(help="Cloud of the nodes, in place of cluster.provider; auto is none where no cluster is asked."),
    ] = None,
    image: Annotated[str | None, typer.Option(help="Image of the trainer, in place of cluster.image.")] = None,
    storage_class: Annotated[
        str | None, typer.Option(help="Class of the shared volume, in place of storage.storageClassName.")
    ] = None,
    output: Annotated[Literal["yaml", "json"], typer.Option(help="yaml documents, or one List in json.")] = "yaml",
) -> None:
    """Print the Kubernetes objects that the operator would apply for a job; needs no cluster.

    They are those of a job whose preflight has passed, without the owner reference by which they go with the job:
    with no workers while its data is being prepared (dataset.prepare), and none on demand while none waits for spot.

    Example: spotune render job.yaml --provider aks | kubectl apply --dry-run=server --filename -
    """
    from spotune_operator.children import build_children
    from spotune_operator.children.raycluster import Replicas
    from spotune_operator.children.resolved_job import place
    from spotune_operator.providers import PROVIDERS, ProviderName

    changes = {
        "spec.cluster.provider": provider,
        "spec.cluster.image": image,
        "spec.storage.storageClassName": storage_class,
    }
    wanted = _read(job, {path: value for path, value in changes.items() if value is not None})
    named = wanted.spec.cluster.provider
    placed = place(wanted, PROVIDERS[ProviderName.NONE if named == "auto" else ProviderName(named)])
    workers = 0 if wanted.spec.dataset.prepare is not None else wanted.spec.workers.count
    children = build_children(placed, Replicas(workers))
    typer.echo(as_yaml(children) if output == "yaml" else _as_json(children), nl=False)


def _read(file: Path, changes: dict[str, Any]) -> FinetuneJob:
    """The job of a file with the command line's options in it."""
    from spotune.job_file.load import load_job, replace_fields

    return replace_fields(load_job(file), changes)


def operator() -> None:
    """Run the operator: watch FinetuneJobs, and bring up what they need, until told to go.

    Runs in a pod with its service account, or elsewhere with KUBECONFIG. Every setting is a variable of the
    environment, such as SPOTUNE_OPERATOR_IMAGE; a wrong name is refused with the list of all. Probes and metrics are
    at :8080 (/livez, /readyz, /metrics).

    Example: SPOTUNE_OPERATOR_WATCH_NAMESPACES=team spotune operator
    """
    from spotune_operator.main import run
    from spotune_operator.settings import Settings

    run(Settings.from_environment())


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """True: the same part twice is written twice."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def as_yaml(objects: Iterable[dict[str, Any]]) -> str:
    """Manifests as YAML documents, the fields in the order in which they were built, and the innermost on one line."""
    return yaml.dump_all(
        objects, Dumper=_Dumper, sort_keys=False, explicit_start=True, default_flow_style=None, width=120
    )


def _as_json(objects: list[dict[str, Any]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2) + "\n"
