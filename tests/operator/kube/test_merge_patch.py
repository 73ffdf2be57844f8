"""Merge patches: their content and their effect."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotune_operator.kube.merge_patch import merge_patch

NAMES = st.sampled_from("abc")
VALUES = st.recursive(
    st.booleans() | st.integers(-2, 2) | st.sampled_from([0.5, "", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=3)
"""JSON objects without null, as a status is."""


def applied(target: Any, patch: Any) -> Any:
    """``MergePatch`` of RFC 7396, section 2, verbatim."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = applied(result.get(name), value)
    return result


@settings(max_examples=100, deadline=None, derandomize=True)
@given(OBJECTS, OBJECTS)
def test_a_patch_turns_one_object_into_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert applied(before, merge_patch(before, after)) == after


@settings(max_examples=20, deadline=None, derandomize=True)
@given(OBJECTS)
def test_patch_between_equals_is_empty(content: dict[str, Any]) -> None:
    assert merge_patch(content, content) == {}


@pytest.mark.parametrize(
    ("before", "after", "patch"),
    [
        ({"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.0}, {"step": 2}),
        ({"loss": 2.0}, {}, {"loss": None}),
        ({}, {"loss": 2.0}, {"loss": 2.0}),
        ({"restarts": {"hang": 1, "total": 1}}, {"restarts": {"hang": 2, "total": 1}}, {"restarts": {"hang": 2}}),
        ({"lastCheckpoint": {"step": 1}}, {}, {"lastCheckpoint": None}),
        ({"conditions": [1, 2]}, {"conditions": [1, 3]}, {"conditions": [1, 3]}),
        ({"a": {}}, {"a": 1}, {"a": 1}),
    ],
)
def test_patch_has_changed_fields_only(before: dict[str, Any], after: dict[str, Any], patch: dict[str, Any]) -> None:
    assert merge_patch(before, after) == patch
