"""Models of the Hugging Face Hub without network access: their names, and the `config.json` of downloaded ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

HUB_HINT: Final = "a model on the Hugging Face Hub begins with hf://"
"""The likely cause if a folder of a model does not exist."""


def cached_config(source: str, revision: str, environment: Mapping[str, str]) -> Path | None:
    """The `config.json` of an `hf://owner/name` source in the cache of `huggingface_hub`; None if it is not there.

    The layout is that of https://huggingface.co/docs/huggingface_hub/guides/manage-cache: `refs` holds the commit of a
    branch or tag, and `snapshots` a folder for each commit.

    Args:
        source: the model.
        revision: branch, tag or commit.
        environment: environment variables, which may name the cache.
    """
    home = environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(environment.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    model = cache / f"models--{source.removeprefix('hf://').strip('/').replace('/', '--')}"
    ref = model / "refs" / revision
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
    file = model / "snapshots" / commit / "config.json"
    return file if file.is_file() else None
