"""Manifests, which `spotune shard` writes beside shards: whether the sources of a mixture were tokenized alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spotune.errors import JobError

MANIFEST = "manifest.json"
INDEX = "index.json"
"""The file of MosaicML streaming that lists the shards of a folder."""

Manifest = Mapping[str, Any]


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder of shards, which is in it or, for one of two splits, beside it; None without one.

    Raises:
        JobError: the manifest is not JSON.
    """
    for path in (folder / MANIFEST, folder.parent / MANIFEST):
        if path.is_file():
            return parse_manifest(path.read_bytes(), str(path))
    return None


def parse_manifest(content: bytes, place: str) -> Manifest | None:
    """The manifest with this content; None if it is that of another tool.

    Raises:
        JobError: it is not JSON, or has other options than `spotune shard` writes; the message names `place`.
    """
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise JobError(f"{place} is not JSON ({error}): write the shards again with `spotune shard`") from error
    if not isinstance(manifest, dict) or "tokenizerHash" not in manifest:
        return None
    options = manifest.get("options", {})
    text = options.get("text", {}) if isinstance(options, dict) else None
    if not isinstance(text, dict) or not isinstance(text.get("labels", []), list):
        raise JobError(f"{place} has no valid options: write the shards again with `spotune shard`")
    return manifest


def check_agreement(manifests: Mapping[str, Manifest | None]) -> None:
    """Check that the sources of a mixture have the same tokenizer, task and maximum lengths.

    Whether rows are packed may differ: a batch may have rows of both kinds.

    Args:
        manifests: by the name of the source; None for shards that `spotune shard` did not write, which are not checked.

    Raises:
        JobError: two sources differ; the message names both.
    """
    known = {name: _compared(manifest) for name, manifest in manifests.items() if manifest is not None}
    if not known:
        return
    first, *others = known
    for other in others:
        for what, value in known[first].items():
            found = known[other][what]
            if found != value:
                values = "" if what == "tokenizer" else f" ({value} and {found})"
                raise JobError(
                    f"spec.dataset.mixture: the sources {first} and {other} have another {what}{values}, so their rows "
                    "do not fit together: write the shards of one again with `spotune shard`"
                )


def check_label_names(manifest: Manifest | None, source: str, labels: Sequence[str]) -> None:
    """Check that rows were labelled with the labels of a job, because shards have the positions of labels only.

    Args:
        manifest: of the shards; None for shards that `spotune shard` did not write, which are not checked.
        source: of the shards, for the message.
        labels: `dataset.labels` of the job.

    Raises:
        JobError: they have other labels, or the same in another order.
    """
    text = manifest.get("options", {}).get("text", {}) if manifest is not None else {"labels": labels}
    found = text.get("labels", [])
    if list(found) != list(labels):
        written = ", ".join(map(str, found)) or "none"
        raise JobError(
            f"dataset.labels: the shards {source} were written with the labels {written}, and the "
            f"job has {', '.join(labels) or 'none'}: use the same labels in the same order, or write the shards again"
        )


def _compared(manifest: Manifest) -> dict[str, Any]:
    text = manifest.get("options", {}).get("text", {})
    return {
        "tokenizer": manifest["tokenizerHash"],
        "task": text.get("task"),
        "maxLength": text.get("maxLength"),
        "maxCompletionLength": text.get("maxCompletionLength"),
    }
