"""What a rank's process makes of its agent's messages."""

from __future__ import annotations

from multiprocessing import Pipe

from spotune_trainer.worker_group.rank_process import Abort, _Messages


def test_no_generation_counts_as_aborted_if_none_has_begun() -> None:
    agent, rank = Pipe()
    with agent:  # the thread that receives ends with it
        messages = _Messages(rank, lambda: None)
        assert not messages.end()


def test_an_abort_of_another_generation_has_no_effect() -> None:
    agent, rank = Pipe()
    with agent:  # the thread that receives ends with it
        messages = _Messages(rank, lambda: None)
        messages.begin(2)
        agent.send(Abort(1))
        assert not messages.end()
