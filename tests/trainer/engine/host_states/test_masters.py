"""Optimizer states in host memory take the steps of states on the device, bit for bit, at ZeRO stages 1 and 2."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.engine import zero_state
from spotune_trainer.engine.host_states import masters
from spotune_trainer.engine.host_states.stream import StateStream, stream_of
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.models.quantization.blockwise import BLOCK_ELEMENTS
from tests.trainer.support.groups import run_group
from tests.trainer.support.layouts import Layout, opened, release, restore, save, train, weights_of, wrap

pytestmark = pytest.mark.slow

NAME = CheckpointName(2, 1)
PIECE_ELEMENTS = 3 * BLOCK_ELEMENTS
"""Less than a matrix, and not a divisor of one."""


def build(optimizer: str, stage: int, world_size: int, offload: Any) -> Any:
    """An engine whose matrices have 8-bit moments with `adamw8bit`, some with a last block that is not full."""
    sizes: dict[str, Any] = {"hidden_size": 36, "head_dim": 18, "intermediate_size": 130, "num_hidden_layers": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=151, num_attention_heads=2, **sizes, tie_word_embeddings=True)
        model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    small_pieces = partial(StateStream, piece_elements=PIECE_ELEMENTS)
    with patch.object(masters, "StateStream", small_pieces):
        return wrap(model, Layout(stage, world_size, "bfloat16", offload), optimizer=optimizer)


def state_and_weights(engine: Any) -> dict[str, torch.Tensor]:
    """All that this rank saves, as a checkpoint has it, and the model's weights."""
    found = {
        f"{fragment.parameter}/{name}": torch.cat([piece.detach() for piece in state.split(1 << 20)])
        for fragment in zero_state.fragments_to_save(engine)
        for name, state in fragment.states.items()
    }
    return {**found, **weights_of(engine)}


def compared(_rank: int, world_size: int, optimizer: str, stage: int, root: Path) -> dict[str, list[str]]:
    """Names of tensors that differ between states on the device and in host memory: after steps, and after a resume."""
    ended = {}
    for offload in ("none", "optimizer"):
        directory = JobDirectory(root / offload)
        engine = build(optimizer, stage, world_size, offload)
        train(engine, 2)
        save(engine, directory, NAME)
        train(engine, 2)
        ended[offload] = state_and_weights(engine)
        release(engine)
        # The other one goes on from the checkpoint.
        other = build(optimizer, stage, world_size, "optimizer" if offload == "none" else "none")
        assert (stream_of(other.basic_optimizer) is not None) is (offload == "none")
        restore(other, opened(directory, NAME))
        train(other, 2)
        ended[f"{offload}, resumed by the other"] = state_and_weights(other)
        release(other)
    expected = ended["none"]
    return {
        name: [each for each in expected if not torch.equal(expected[each], found[each])]
        for name, found in ended.items()
    }


@pytest.mark.parametrize(("stage", "world_size"), [(1, 1), (2, 2), pytest.param(1, 3, marks=pytest.mark.long)])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_states_in_host_memory_end_with_the_same_bits(
    optimizer: str, stage: int, world_size: int, tmp_path: Path
) -> None:
    for differing in run_group(world_size, compared, optimizer, stage, tmp_path):
        assert differing == {name: [] for name in differing}
        assert len(differing) == 4


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    (differing,) = run_group(1, after_a_skipped_step)
    assert differing == []


def after_a_skipped_step(_rank: int, _world_size: int) -> list[str]:
    """Names of what a step with an infinite gradient has changed in host memory."""
    engine = build("adamw8bit", 1, 1, "optimizer")
    train(engine, 1)
    before = {name: tensor.clone() for name, tensor in state_and_weights(engine).items()}

    def spoil() -> None:
        engine.optimizer.averaged_gradients[0][0].fill_(torch.inf)

    train(engine, 1, before_update=spoil)
    after = state_and_weights(engine)
    return [name for name in before if not torch.equal(before[name], after[name])]
