"""The record of a running local head in `supervisor.json`."""

from __future__ import annotations

from pathlib import Path

from spotune_trainer.supervisor.ray_head.local import LocalRay, RunningRay, process_marker
from spotune_trainer.supervisor.ray_head.processes import Process, ProcessFamily

RUNNING = RunningRay(
    url="http://127.0.0.1:8265",
    address="127.0.0.1:6379",
    temporary=Path("/tmp/spotune-0-0123"),
    family=ProcessFamily(Process(17, 1000), "an earlier boot", "SPOTUNE_LOCAL_RAY=/tmp/spotune-0-0123"),
    parts={"gcs": Process(18, 1001)},
    slots=2,
)


def test_record_of_a_head_is_read_back() -> None:
    assert RunningRay.from_json(RUNNING.to_json()) == RUNNING


def test_record_has_the_keys_that_earlier_versions_wrote() -> None:
    assert RUNNING.to_json() == {
        "url": "http://127.0.0.1:8265",
        "address": "127.0.0.1:6379",
        "temporary": "/tmp/spotune-0-0123",
        "family": {
            "leader": {"pid": 17, "started": 1000},
            "boot": "an earlier boot",
            "mark": "SPOTUNE_LOCAL_RAY=/tmp/spotune-0-0123",
        },
        "parts": {"gcs": {"pid": 18, "started": 1001}},
        "slots": 2,
    }


def test_head_of_an_earlier_boot_is_not_taken_over(tmp_path: Path) -> None:
    head = LocalRay(tmp_path, 2, gpus=False)
    record = RUNNING.to_json() | {"temporary": str(tmp_path / "ray")}
    assert not head.reattach(record)
    assert not head.reattach(None)
    assert (head.is_alive(), head.is_responding(), head.record()) == (False, False, None)


def test_marker_depends_on_the_directory_alone(tmp_path: Path) -> None:
    assert process_marker(tmp_path) == process_marker(tmp_path)
    assert process_marker(tmp_path) != process_marker(tmp_path / "other")
