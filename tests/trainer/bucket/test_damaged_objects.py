"""Objects of a checkpoint that are lost or damaged after the driver has listed them: another checkpoint is restored."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotune_trainer.bucket.checkpoints import refresh
from spotune_trainer.bucket.client import Bucket
from spotune_trainer.checkpoint.generations import choose_checkpoint, claim
from spotune_trainer.checkpoint.reader import CorruptCheckpointError
from tests.trainer.bucket.conftest import linked_directory
from tests.trainer.bucket.test_checkpoints import checkpointers, commit
from tests.trainer.support.checkpoints import restore

HEADER_BYTES = 8
"""Length of the header, which a file of tensors begins with."""


@pytest.mark.parametrize("begin", [None, b"short", b"\xff" * HEADER_BYTES, (1 << 40).to_bytes(HEADER_BYTES, "little")])
def test_a_file_whose_begin_is_damaged_makes_its_checkpoint_corrupt(
    bucket: Bucket, tmp_path: Path, begin: bytes | None
) -> None:
    home, other = linked_directory(bucket, tmp_path / "home"), linked_directory(bucket, tmp_path / "other")
    claim(home, None)
    commit(checkpointers([home]), 5)
    refresh(bucket, other)
    checkpoint = choose_checkpoint(other).checkpoint
    assert checkpoint is not None
    name = "checkpoints/step-00000005.gen-1/rank-00000.safetensors"
    content = bucket.read(name)
    assert content is not None
    if begin is None:
        bucket.delete([name])
    else:
        bucket.write(name, begin + content[HEADER_BYTES:] if len(begin) == HEADER_BYTES else begin)
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.safetensors in the bucket "):
        restore(checkpoint, [None])
