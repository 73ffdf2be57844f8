"""What Kueue has written into a RayCluster and its pods."""

from __future__ import annotations

from typing import Any

import pytest

from spotune_operator.kueue.names import ELASTIC_GATE, WORKLOAD_ANNOTATION, cannot_be_admitted, is_held_back


@pytest.mark.parametrize(
    ("gates", "expected"), [(None, False), ([], False), (["other"], False), (["other", ELASTIC_GATE], True)]
)
def test_pod_is_held_back_by_the_gate_of_kueue(gates: list[str] | None, expected: bool) -> None:
    spec = {"schedulingGates": [{"name": name} for name in gates] if gates is not None else None}
    assert is_held_back(spec) is expected


@pytest.mark.parametrize(
    ("suspended", "annotations", "expected"),
    [
        (True, {WORKLOAD_ANNOTATION: "raycluster-a"}, True),
        (True, {"other": "1"}, False),
        (True, None, False),
        (False, {WORKLOAD_ANNOTATION: "raycluster-a"}, False),
    ],
)
def test_suspended_cluster_with_an_earlier_admission_cannot_be_admitted(
    suspended: bool, annotations: dict[str, str] | None, expected: bool
) -> None:
    spec: dict[str, Any] = {
        "suspend": suspended,
        "workerGroupSpecs": [{"template": {"metadata": {"annotations": annotations}}}],
    }
    assert cannot_be_admitted(spec) is expected
