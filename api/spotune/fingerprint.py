"""A hash of what a job trains. Jobs with equal fingerprints can resume from each other's checkpoints."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from spotune.job import FinetuneJob

_FINGERPRINTED_SECTIONS = {
    "model": {"tokenSecretRef"},
    "adapter": frozenset[str](),
    "dataset": {"credentials", "maxSkipped"},
    "training": {"epochs", "maxSteps", "maxBadSteps", "evaluation", "command", "code", "codeFrom", "config"},
}
"""Sections that define what is trained, and their fields that do not: duration, credentials, limits, evaluation, and
code of the user's own. Of `execution`, only a precision of 8 bits belongs to it."""


def _fingerprinted_content(job: FinetuneJob) -> dict[str, Any]:
    """The fingerprinted fields without default values, so that fields added later do not change old fingerprints."""
    sections = job.spec.model_dump(mode="json", exclude_defaults=True)
    content: dict[str, Any] = {
        name: {field: value for field, value in sections[name].items() if field not in excluded}
        for name, excluded in _FINGERPRINTED_SECTIONS.items()
        if name in sections
    }
    if job.spec.execution.is_fp8:
        content["execution.precision"] = job.spec.execution.precision
    return content


def fingerprint(job: FinetuneJob) -> str:
    """SHA-256 in hex over model, adapter, dataset, training and FP8, independent of field order and explicit defaults.

    Sources are hashed as written. Only compare jobs that were both resolved with ``load.resolve_paths``, or both not.
    """
    text = json.dumps(_fingerprinted_content(job), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def changed_fields(old: FinetuneJob, new: FinetuneJob) -> list[str]:
    """Sorted camelCase paths of the fields in which the fingerprints differ; empty if they are equal."""
    return sorted(_differing_paths(_fingerprinted_content(old), _fingerprinted_content(new), "spec"))


def _differing_paths(before: Any, after: Any, path: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before.keys() | after.keys():
            yield from _differing_paths(before.get(name), after.get(name), f"{path}.{name}")
    elif before != after:
        yield path
