"""The difference of two JSON objects as a merge patch (RFC 7396)."""

from collections.abc import Mapping
from typing import Any


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The merge patch from ``before`` to ``after``: changed fields, and null for removed ones; empty if equal."""
    changes: dict[str, Any] = dict.fromkeys(before.keys() - after.keys())
    for name, value in after.items():
        earlier = before.get(name)
        if isinstance(value, Mapping) and isinstance(earlier, Mapping):
            if inner := merge_patch(earlier, value):
                changes[name] = inner
        elif name not in before or earlier != value:
            changes[name] = value
    return changes
