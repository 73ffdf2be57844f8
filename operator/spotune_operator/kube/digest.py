"""Hashes of objects, with which the operator notices changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

_SERVER_FIELDS: Final = ("managedFields", "resourceVersion", "generation", "creationTimestamp", "uid", "selfLink")


def content_digest(raw: Mapping[str, Any]) -> str:
    """A hash of an object without its status and the fields that the API server sets.

    The kind is left out, too: the API server omits it from the items of a list, and adds it to the events of a watch.
    """
    content = {name: value for name, value in raw.items() if name not in ("apiVersion", "kind", "status", "metadata")}
    metadata = {name: value for name, value in raw["metadata"].items() if name not in _SERVER_FIELDS}
    return digest({**content, "metadata": metadata})


def digest(content: Any) -> str:
    """A short hash of a JSON value; the order of fields does not matter."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
