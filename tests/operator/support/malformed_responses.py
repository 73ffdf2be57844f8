"""Malformed `/progress` responses (broken, hostile, of another version) for property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from spotune_operator.observe.supervisor_status import (
    CheckpointResponse,
    CheckResponse,
    PreflightResponse,
    ProgressResponse,
    RestartsResponse,
    SupervisorResponse,
)

_TEXTS = st.one_of(
    st.text(st.characters(codec=None, categories=None), max_size=20),
    st.sampled_from(["", "\ud800", "\x00", "Training", "x" * 3000, "\u0300", "trained", "failed", "stopped"]),
)
_NUMBERS = st.one_of(
    st.integers(-3, 200),
    st.floats(),
    st.sampled_from(
        [-1, 0, 2**31, 2**53 - 1, 2**53, 2**63, 10**30, 10**400, 1e308, 5e-324, -0.0, 1.8e9, 253402300800.0]
    ),
)
values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_TEXTS, inner, max_size=3)),
    max_leaves=6,
)
"""Any value of Python's JSON parser, with infinities and NaN."""


def _section(model: type[Any], **parts: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A mapping with some fields of a model, each valid or not."""
    names = {field.alias: parts.get(name, values) for name, field in model.model_fields.items()}
    return st.fixed_dictionaries({}, optional={name: part | values for name, part in names.items()})


def answers() -> st.SearchStrategy[dict[str, Any]]:
    """`/progress` responses in which any field may be invalid."""
    counts = st.integers(0, 200)
    amounts = st.floats(0, 10)
    checks = st.lists(
        _section(CheckResponse, status=st.sampled_from(["passed", "failed", "running"])) | values, max_size=3
    )
    preflight = _section(PreflightResponse, passed=st.booleans(), checks=checks)
    states = st.sampled_from(["preflight", "running", "waiting", "stopping", "stopped", "failed", "trained"])
    phases = ["Starting", "Preparing", "WaitingForWorkers", "Loading", "Training", "Evaluating", "Exporting", "Done"]
    restarts = dict.fromkeys(RestartsResponse.model_fields, counts)
    return _section(
        ProgressResponse,
        phase=st.sampled_from([*phases, "Failed"]),
        step=counts,
        total_steps=counts,
        loss=amounts,
        eta_seconds=amounts,
        last_checkpoint=_section(CheckpointResponse, step=counts, time=st.floats(1.7e9, 1.9e9)),
        restarts=_section(RestartsResponse, **restarts),
        supervisor=_section(SupervisorResponse, state=states, preflight=preflight),
    )
