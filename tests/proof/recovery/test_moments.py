"""The moments of a copy between nodes are visible from outside: kills during them would miss without an error."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tests.proof.injected.recovery_moments as moments
from tests import ROOT
from tests.proof.injected import injected_path

COPY = """
import threading
from pathlib import Path
import sys
import xxhash
from spotune_trainer.checkpoint.layout import MANIFEST
from spotune_trainer.checkpoint.memory.peer_reader import PeerReader
from spotune_trainer.checkpoint.memory.segment import LABEL_BYTES, Label
from tests.proof.injected.recovery_moments import Wire, senders
from tests.trainer.support.peers import SECRET, nodes
from tests.trainer.support.waiting import wait_until

folder, checkpoints = Path(sys.argv[1]), Path(sys.argv[2])
content, name = bytes(200_000), "step-00000005.gen-1"
label = Label(name, "rank-0", len(content), xxhash.xxh3_64(content).hexdigest())
(checkpoints / name).mkdir()
(checkpoints / name / MANIFEST).touch()
with nodes(2) as (first, second):
    (memory,) = first.begin(1)
    second.begin(1)
    segment = memory.begin(len(content))
    memory.complete(segment, label)
    sender = first.sender(second, checkpoints)
    sender.start()
    assert wait_until(lambda: bool(senders(folder, Wire.COPY)), 60), "no copy was visible"
    assert wait_until(lambda: second.copies.find(label) is not None, 60)
    assert not senders(folder, Wire.READ)
    sender.stop()
    reader = PeerReader((second.server.address,), SECRET)
    (held,) = reader.find([label])[label.file]
    threading.Thread(target=reader.read, args=[held]).start()
    assert wait_until(lambda: bool(senders(folder, Wire.READ)), 60), "no read was visible"
"""


def test_copies_and_reads_of_a_peer_are_visible(tmp_path: Path) -> None:
    folder, checkpoints = tmp_path / "moments", tmp_path / "checkpoints"
    folder.mkdir()
    checkpoints.mkdir()
    environment = {**os.environ, "PYTHONPATH": injected_path(), moments.MOMENTS: str(folder)}
    command = [sys.executable, "-c", COPY, str(folder), str(checkpoints)]
    finished = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize(("left", "sending"), [(0, []), (moments._CHUNK_BYTES, []), (moments._CHUNK_BYTES + 1, [7])])
def test_the_last_chunk_is_not_the_middle_of_a_copy(tmp_path: Path, left: int, sending: list[int]) -> None:
    moments._write(tmp_path / "copy-7", {"time": time.monotonic() + 60, "left": left})
    assert moments.senders(tmp_path, moments.Wire.COPY) == sending
