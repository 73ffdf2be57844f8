"""Which nodes are unfit by comparison with others."""

from __future__ import annotations

import pytest

from spotune_trainer.worker_group.fitness.measurements import DeviceMeasurement, NodeMeasurement, NodeRecord
from spotune_trainer.worker_group.fitness.verdict import of_interest, unfit_nodes


def node(name: str, *tflops: float, kind: str = "cuda", gpu: str = "H100") -> NodeRecord:
    devices = [
        DeviceMeasurement(index, kind, gpu, 1 << 30, speed)  # type: ignore[arg-type]
        for index, speed in enumerate(tflops)
    ]
    return NodeRecord(name, "boot", NodeMeasurement(tuple(devices)))


@pytest.mark.parametrize(
    ("nodes", "unfit"),
    [
        pytest.param([node("a", 700), node("b", 690), node("c", 540)], ["c"], id="a slow GPU"),
        pytest.param([node("a", 700), node("b", 690), node("c", 600)], [], id="not that slow"),
        pytest.param([node("a", 700), node("b", 400)], [], id="two"),
        pytest.param([node("a", 700, 690, 700, 300)], ["a"], id="one of the GPUs of a node"),
        pytest.param([node("a", 700), node("b", 690), node("c", 300, gpu="A100")], [], id="another type"),
        pytest.param(
            [node("a", 0.7, kind="cpu"), node("b", 0.7, kind="cpu"), node("c", 0.1, kind="cpu")], [], id="cpu"
        ),
    ],
)
def test_gpus_are_compared_with_those_of_their_type(nodes: list[NodeRecord], unfit: list[str]) -> None:
    assert list(unfit_nodes(nodes)) == [f"{name} boot" for name in unfit]


def test_nodes_that_are_gone_tell_how_fast_gpus_are_but_not_how_fast_the_network_is() -> None:
    gone = NodeRecord("gone", "boot", node("", 700, 700).measured, {"a boot": 1e9, "b boot": 1e9})
    records = {each.key: each for each in (gone, node("a", 500))}
    found = of_interest(records, {"a boot"})
    assert [each.links for each in found] == [{}, {}]
    reason = unfit_nodes(found)["a boot"]
    assert reason == "GPU 0 (H100): it computes 500.0 TFLOP/s, 71% of the median of 3 GPUs of this type"


def test_record_survives_the_ledger() -> None:
    record = NodeRecord(
        "a", "boot", NodeMeasurement((DeviceMeasurement(0, "cpu", "cpu"),), ("x",), 0.5), {"b boot": 1e9}
    )
    assert NodeRecord.from_json({"time": 1.0, "event": "node-checked", **record.as_json()}) == record
