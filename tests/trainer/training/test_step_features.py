"""Features of a step are in the order of its samples, whatever the ranks; statistics count their own answers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spotune_trainer.objectives.kto import LabelledRewards
from spotune_trainer.training.step_features import agree_on_width, gather_features
from tests.trainer.support.groups import run_group

SAMPLES = 11
MICRO_BATCH = 3


def gathered(rank: int, world_size: int) -> list[list[float]]:
    """The features of a step that numbers its samples: micro-batches of 3, 3, 3 and 2 samples."""
    step = torch.arange(SAMPLES * 2, dtype=torch.float32).view(SAMPLES, 2)
    of_rank: list[Tensor] = list(torch.split(step, MICRO_BATCH))[rank::world_size]
    width = agree_on_width(of_rank, torch.distributed.group.WORLD)
    shape = -(-4 // world_size), MICRO_BATCH, width
    return gather_features(of_rank, shape, SAMPLES, "cpu").tolist()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_features_are_in_the_order_of_the_samples_at_any_world_size(world_size: int) -> None:
    expected = torch.arange(SAMPLES * 2, dtype=torch.float32).view(SAMPLES, 2).tolist()
    assert run_group(world_size, gathered) == [expected] * world_size


def test_rewards_are_means_over_the_answers_of_one_label() -> None:
    found = LabelledRewards().means([6.0, 3, -1.0, 1, 8.0], samples=4)
    assert found == {"kl": 2.0, "rewardChosen": 2.0, "rewardRejected": -1.0, "rewardMargin": 3.0}


def test_a_step_without_undesirable_answers_has_no_reward_of_them() -> None:
    assert LabelledRewards().means([6.0, 3, 0.0, 0, 3.0], samples=3) == {"kl": 1.0, "rewardChosen": 2.0}
