"""An agent that was started before its driver."""

from __future__ import annotations

import tempfile
from contextlib import suppress

import pytest

from spotune_trainer.worker_group.agent_link import (
    EXIT,
    AgentGoneError,
    agents_folder,
    attach,
    call,
    start_early,
)


@pytest.mark.slow
def test_driver_attaches_to_the_agent_that_was_started_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # paths of sockets are limited
        monkeypatch.setattr(tempfile, "tempdir", short)
        for _ in range(2):  # the second call finds the agent of the first one
            start_early(["job", "0"])
        (path,) = agents_folder("job").glob("*.sock")
        try:
            assert attach(agents_folder("job"), "driver", b"secret", "127.0.0.1", gpus=False).path == path
        finally:
            with suppress(AgentGoneError):
                call(path, EXIT)
