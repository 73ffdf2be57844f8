"""`spotune render` and `spotune operator`. Imports of the operator happen when they run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
import yaml

from spotune.errors import UsageError

if TYPE_CHECKING:
    from spotune.job import FinetuneJob
    from spotune.service import ClaimSource, ModelService
    from spotune.sweep import FinetuneSweep
    from spotune_operator.children.serving.resolved_service import ModelLocation
    from spotune_operator.providers import Provider

_FINGERPRINT: Final = "FINGERPRINT"
"""Placeholder for the fingerprint of a FinetuneJob."""


def render(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.yaml", help="File with a FinetuneJob, a ModelService or a FinetuneSweep.")
    ],
    provider: Annotated[
        Literal["aks", "gke", "eks", "none"] | None,
        typer.Option(help="Overrides cluster.provider. auto means none here, because no cluster is queried."),
    ] = None,
    image: Annotated[str | None, typer.Option(help="Container image. Overrides cluster.image.")] = None,
    storage_class: Annotated[
        str | None,
        typer.Option(help="StorageClass of the shared volume of a FinetuneJob. Overrides storage.storageClassName."),
    ] = None,
    output: Annotated[Literal["yaml", "json"], typer.Option(help="YAML documents, or one List as JSON.")] = "yaml",
) -> None:
    """Print the Kubernetes objects that the operator would apply for a FinetuneJob, ModelService or FinetuneSweep.

    It needs no cluster. The objects have no owner references.

    The output for a job is that after preflight. It has no workers if the data still has to be prepared
    (dataset.prepare), and no on-demand workers. With spec.serving it includes the ModelService.

    The output for a service is that after its FinetuneJobs have finished. Only the operator knows where they wrote
    their models: the text FINGERPRINT stands in the paths for the fingerprint of the job.

    The output for a sweep is the FinetuneJobs of the trials that start first: spec.maxConcurrent of them.

    Example: spotune render job.yaml --provider aks | kubectl apply --dry-run=server --filename -
    """
    from spotune.job import FinetuneJob
    from spotune.job_file.deadlines import refuse_past_deadline
    from spotune.job_file.load import load_resource, replace_fields
    from spotune.sweep import FinetuneSweep

    changes = {
        "spec.cluster.provider": provider,
        "spec.cluster.image": image,
        "spec.storage.storageClassName": storage_class,
    }
    parsed = load_resource(file)
    given = {path: value for path, value in changes.items() if value is not None}
    if isinstance(parsed, FinetuneSweep):
        if given:
            raise UsageError("--provider, --image and --storage-class are for jobs: change spec.template of the sweep")
        refuse_past_deadline(parsed, file, time.time())
        children = _children_of_sweep(parsed)
    elif isinstance(parsed, FinetuneJob):
        refuse_past_deadline(parsed, file, time.time())
        children = _children_of_job(replace_fields(parsed, given))
    elif storage_class is not None:
        raise UsageError("--storage-class is for FinetuneJobs: a ModelService creates no volume")
    else:
        children = _children_of_service(replace_fields(parsed, given))
    typer.echo(as_yaml(children) if output == "yaml" else _as_json(children), nl=False)


def _children_of_job(job: FinetuneJob) -> list[dict[str, Any]]:
    from spotune_operator.children import build_children
    from spotune_operator.children.resolved_job import resolve
    from spotune_operator.reconcile.pools.choosing import first_replicas

    workers = 0 if job.spec.prepares_data else job.spec.workers.count
    return build_children(resolve(job, _provider(job.spec.cluster.provider)), first_replicas(job, workers))


def _children_of_sweep(sweep: FinetuneSweep) -> list[dict[str, Any]]:
    from spotune.sweep import FinetuneSweepStatus
    from spotune_operator.settings import Settings
    from spotune_operator.sweeps.decide import decide_sweep
    from spotune_operator.sweeps.state import ObservedSweep

    decision = decide_sweep(
        sweep,
        uid="",
        generation=0,
        previous=FinetuneSweepStatus(),
        observed=ObservedSweep(),
        now=0.0,
        settings=Settings(),
    )
    return list(decision.create)


def _children_of_service(service: ModelService) -> list[dict[str, Any]]:
    from spotune_operator.children.serving import build_service_children
    from spotune_operator.children.serving.resolved_service import only_version, resolve_service

    spec = service.spec
    namespace = service.metadata.namespace
    model = _location(namespace, spec.model.finetune_job, spec.model.claim, spec.model.source, spec.model.revision)
    adapters = {each.name: _location(namespace, each.finetune_job, each.claim) for each in spec.adapters}
    provider = _provider(spec.cluster.provider)
    return build_service_children(resolve_service(service, provider, versions=[only_version(service, model, adapters)]))


def _location(
    namespace: str, job: str, claim: ClaimSource | None, source: str = "", revision: str = ""
) -> ModelLocation:
    """Where a model is; for that of a FinetuneJob, with a placeholder for the fingerprint."""
    from spotune_operator.children.serving.resolved_service import ModelLocation
    from spotune_operator.serving.model_location import claim_location

    if source:
        return ModelLocation(source=source, version=revision)
    if claim is not None:
        return claim_location(claim)
    path = f"{namespace}/{job}-{_FINGERPRINT}/export"
    return ModelLocation(claim=f"spotune-{job}", path=path, version=_FINGERPRINT)


def _provider(name: str) -> Provider:
    from spotune_operator.providers import PROVIDERS, ProviderName

    return PROVIDERS[ProviderName.NONE if name == "auto" else ProviderName(name)]


def operator() -> None:
    """Run the operator: watch FinetuneJobs and other kinds, and manage their Ray clusters, until SIGTERM.

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
