"""Gathers the features of all samples of a step: see `objectives.objective.StepObjective`.

Micro-batch g of a step belongs to rank g mod world size, and all but the last one are full. So the features of all
ranks, padded to full micro-batches and interleaved by rank, are in the order of the step's samples: they do not depend
on the world size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed


def agree_on_width(of_rank: Sequence[Tensor], group: Any) -> int:
    """Features of a sample, which a rank without micro-batches does not know. Collective: every rank must call it.

    Args:
        of_rank: features of each micro-batch of this rank, ``[micro-batch, features]``.
        group: of all ranks, for tensors on the host.
    """
    width = torch.tensor(of_rank[0].size(1) if of_rank else 0)
    distributed.all_reduce(width, distributed.ReduceOp.MAX, group=group)
    return int(width)


def gather_features(
    of_rank: Sequence[Tensor], padded_shape: tuple[int, int, int], samples: int, device: torch.device | str
) -> Tensor:
    """Features of all samples of a step. Collective: every rank must call it.

    Args:
        of_rank: features of each micro-batch of this rank, fp32, ``[micro-batch, features]``.
        padded_shape: micro-batches of each rank in a step, samples of a full micro-batch, and features of a sample.
        samples: samples of the step, over all ranks.
        device: that the ranks' collectives use.

    Returns:
        ``[samples, features]``, fp32, the same on all ranks.
    """
    padded = torch.zeros(padded_shape, dtype=torch.float32, device=device)
    for index, features in enumerate(of_rank):
        padded[index, : len(features)] = features
    of_ranks = [torch.empty_like(padded) for _ in range(distributed.get_world_size())]
    distributed.all_gather(of_ranks, padded)
    return torch.stack(of_ranks, dim=1).flatten(0, 2)[:samples]
