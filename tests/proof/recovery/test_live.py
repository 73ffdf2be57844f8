"""A recovery schedule on the whole product: its record says where the state was read from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proof.recovery.prover import RecoveryProver
from tests.proof.recovery.schedules import Kill, Moment, RecoverySchedule, Target
from tests.trainer.support.runs import Runs

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(900)]


def test_lost_node_is_recovered_from_its_peer_after_the_reader_was_killed(tmp_path: Path) -> None:
    kills = (
        Kill(Target.NODE, Moment.COPIED, after_step=6, victim=0.9, delay=0.0),
        Kill(Target.READER, Moment.PEER_READ, after_step=0, victim=0.0, delay=0.02),
    )
    schedule = RecoverySchedule(0, (1, 1), zero_stage=2, memory_copies=2, resizes=False, rounds=(kills,))
    record = RecoveryProver(Runs(tmp_path), "`0123`", "here").prove(schedule)
    assert record.findings == []
    assert [(kill.target, kill.hit) for kill in record.kills] == [(Target.NODE, True), (Target.READER, True)]
    (restore,) = record.restores
    assert restore.volume == 0
    assert min(restore.memory, restore.peer) > 0


def test_volume_is_read_after_both_holders_were_lost(tmp_path: Path) -> None:
    kill = Kill(Target.HOLDERS, Moment.COPIED, after_step=6, victim=0.0, delay=0.0)
    schedule = RecoverySchedule(0, (1, 1), zero_stage=1, memory_copies=2, resizes=False, rounds=((kill,),))
    record = RecoveryProver(Runs(tmp_path), "`0123`", "here").prove(schedule)
    assert record.findings == []
    (restore,) = record.restores
    assert (restore.memory, restore.peer) == (0, 0)
    assert restore.volume > 0
