"""Optimizers whose update of a parameter depends on all of its elements, at ZeRO stages 0 to 2.

At stages 1 and 2 the border of two partitions may cut a parameter. Its elements are then on several ranks. At most
world size - 1 parameters of a parameter group are cut. For each of these, all ranks add up tensors that are zero except
for their own slice, which gives the whole exactly. Every rank with a slice then computes the whole update, and keeps
its part. All other parameters need no communication.

Stage 3 cuts every parameter, so each rank would compute each update: `spotune validate` refuses it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from spotune_trainer.engine.optimizers.master_optimizer import Gradients, MasterOptimizer, MasterSlice


class WholeParameterOptimizer(MasterOptimizer):
    """Finds the parameters that several ranks hold, and assembles them."""

    def __init__(self, groups: list[dict[str, Any]], settings: Mapping[str, Any]) -> None:
        super().__init__(groups, settings)
        self._slices: dict[Tensor, dict[str, MasterSlice]] = {}
        self._cut: dict[Tensor, Mapping[str, int]] = {}
        self._process_group: distributed.ProcessGroup | None = None

    def add_slice(self, piece: MasterSlice) -> None:
        """Announce a slice; see `MasterOptimizer.add_slice`."""
        super().add_slice(piece)
        self._slices.setdefault(piece.master, {})[piece.parameter] = piece

    def find_cut_parameters(self, masters: Sequence[Tensor], process_group: distributed.ProcessGroup) -> None:
        """Agree on the parameters that several ranks hold. Collective; call it when all slices are announced.

        Args:
            masters: of this rank, one for each parameter group.
            process_group: the ranks that share them.
        """
        slices = [self._slices.get(master, {}).values() for master in masters]
        mine = [{piece.parameter: piece.parameter_elements for piece in of if not piece.is_whole} for of in slices]
        of_ranks: list[Any] = [None] * distributed.get_world_size(process_group)
        distributed.all_gather_object(of_ranks, mine, group=process_group)
        for index, master in enumerate(masters):
            found = {name: elements for of_rank in of_ranks for name, elements in of_rank[index].items()}
            self._cut[master] = dict(sorted(found.items()))
        self._process_group = process_group

    def wholes(
        self, master: Tensor, values_of: Callable[[MasterSlice], tuple[Tensor, ...]], dtypes: tuple[torch.dtype, ...]
    ) -> Iterator[tuple[MasterSlice, tuple[Tensor, ...]]]:
        """Each slice of a master, with the values of its whole parameter. Collective if parameters are cut.

        Args:
            master: the master.
            values_of: returns one or more 1-D tensors, with a value for each element of a slice.
            dtypes: of these tensors.

        Returns:
            (slice, tensors in the shape of the parameter) pairs.
        """
        slices = self._slices.get(master, {})
        for name, elements in self._cut.get(master, {}).items():
            piece = slices.get(name)
            parts = values_of(piece) if piece is not None else ()
            whole = [torch.zeros(elements, dtype=dtype, device=master.device) for dtype in dtypes]
            for target, part in zip(whole, parts, strict=piece is not None):
                assert piece is not None
                piece.cut(target).copy_(part)
            for target in whole:
                distributed.all_reduce(target, group=self._process_group)
            if piece is not None:
                yield piece, tuple(target.view(piece.shape) for target in whole)
        for piece in slices.values():
            if piece.is_whole:
                yield piece, tuple(part.view(piece.shape) for part in values_of(piece))


class SlicedGradients:
    """Gradients of a master, by slice.

    Args:
        gradients: of the master; each slice lies within one of them.
        clip: scalar that they are multiplied by.
    """

    def __init__(self, gradients: Gradients, clip: Tensor) -> None:
        self._gradients = list(gradients)
        self._offsets = [offset for offset, _ in self._gradients]
        self._clip = clip

    def of(self, piece: MasterSlice) -> Tensor:
        """Clipped gradient of a slice, fp32, in one dimension."""
        offset, gradient = self._gradients[bisect_right(self._offsets, piece.start) - 1]
        return gradient[piece.start - offset :][: piece.length].float() * self._clip
