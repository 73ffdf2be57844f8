"""Check of the data of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spotune.errors import InfrastructureError, JobError
from spotune.job import FinetuneJob
from spotune_trainer.data.manifests import MANIFEST, Manifest, check_agreement, parse_manifest, read_manifest
from spotune_trainer.data.sampling.mixture_plan import plan_mixture
from spotune_trainer.data.sampling.steps import held_out_count
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.preflight.object_store import read_object
from spotune_trainer.supervisor.preflight.sources import (
    ShardsFacts,
    read_shards,
    read_training_data,
    refuse_missing,
)

_MAX_MANIFEST_BYTES = 4 << 20


def check_mixture(job: FinetuneJob, directory: JobDirectory) -> str:
    """Check that the sources of a mixture exist and fit together, and that the run does not repeat one too often.

    Returns:
        One sentence for each source.

    Raises:
        JobError: a source is missing or damaged, two have another tokenizer or length, or the run needs more passes
            over one than its `maxEpochs`.
        InfrastructureError: the object store did not return them.
    """
    refuse_missing(job, lambda field: not field.startswith("spec.model."))
    found: list[str] = []
    shards: dict[str, ShardsFacts] = {}
    manifests: dict[str, Manifest | None] = {}
    for number, source in enumerate(job.spec.dataset.mixture):
        field = f"spec.dataset.mixture[{number}]"
        data = read_training_data(field, source.train, source.prepare, directory.prepared(source.name))
        found.append(f"{source.name}: {data}")
        if isinstance(data, ShardsFacts):
            shards[source.name] = data
            manifests[source.name] = _read_manifest(data.source, field)
        if source.eval is not None and source.eval.source is not None:
            found.append(f"{source.name}: {read_shards(source.eval.source, f'{field}.eval.source')}")
    check_agreement(manifests)
    sizes = [facts.samples for facts in shards.values() if facts.samples is not None]
    if len(sizes) == len(job.spec.dataset.mixture):
        _check_repeats(job, sizes)
    return "; ".join(found)


def _check_repeats(job: FinetuneJob, sizes: Sequence[int]) -> None:
    """Raise JobError if the run needs too many passes over a source; `sizes` are the samples of each."""
    spec, trained = job.spec.dataset, []
    try:
        for source, size in zip(spec.mixture, sizes, strict=True):
            evaluation = source.eval or spec.eval
            fraction = evaluation.fraction if evaluation is not None else None
            trained.append(size if fraction is None else size - held_out_count(size, fraction))
        plan_mixture(job, trained)
    except ValueError as error:
        raise JobError(f"spec.dataset.mixture: {error}") from error


def _read_manifest(source: str, field: str) -> Manifest | None:
    if "://" not in source:
        return read_manifest(Path(source))
    folder = source.rstrip("/")
    for url in (f"{folder}/{MANIFEST}", f"{folder.rpartition('/')[0]}/{MANIFEST}"):
        try:
            content = read_object(url, _MAX_MANIFEST_BYTES, field)
        except InfrastructureError:  # shards of another tool have none; the index beside it could be read
            continue
        return parse_manifest(content, url) if len(content) < _MAX_MANIFEST_BYTES else None
    return None
