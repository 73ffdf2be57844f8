"""What a job trains, as one hash: two jobs with the same fingerprint go on with each other's checkpoints."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from spotune.job import FinetuneJob

_MEANING = {
    "model": {"tokenSecretRef"},
    "adapter": frozenset[str](),
    "dataset": {"credentials"},
    "training": {"epochs", "maxSteps", "maxBadSteps", "evaluation"},
}
"""The sections that say what is trained, and their fields that do not change it: how long, access, and measuring."""


def _meaning(job: FinetuneJob) -> dict[str, Any]:
    """What is trained, without fields that have their default: a field added later does not change old fingerprints."""
    sections = job.spec.model_dump(mode="json", exclude_defaults=True)
    return {
        name: {field: value for field, value in sections[name].items() if field not in left_out}
        for name, left_out in _MEANING.items()
        if name in sections
    }


def fingerprint(job: FinetuneJob) -> str:
    """SHA-256 in hex over model, adapter, dataset and training, independent of the order and of explicit defaults.

    Sources count as they are written: compare jobs that both went through ``load.resolve_paths``, or neither.
    """
    text = json.dumps(_meaning(job), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def changed_fields(old: FinetuneJob, new: FinetuneJob) -> list[str]:
    """Paths in camelCase, sorted, of the fields that make the two fingerprints differ; empty if they are the same."""
    return sorted(_changes(_meaning(old), _meaning(new), "spec"))


def _changes(before: Any, after: Any, path: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before.keys() | after.keys():
            yield from _changes(before.get(name), after.get(name), f"{path}.{name}")
    elif before != after:
        yield path
