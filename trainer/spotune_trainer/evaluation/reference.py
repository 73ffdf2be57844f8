"""Computes the reference model's log-probabilities of both answers of each row, on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from spotune_trainer.data.batches import Batch, collate
from spotune_trainer.evaluation.evaluate import Rows
from spotune_trainer.evaluation.ranks import RankGroup, evaluation_mode
from spotune_trainer.objectives.pair_log_probs import both_log_probs
from spotune_trainer.objectives.reference import ReferenceLogProbs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("spotune.worker")


def compute_reference(
    model: PreTrainedModel,
    dataset: Rows,
    store: ReferenceLogProbs,
    missing: Sequence[int],
    pad_token_id: int,
    batch_size: int,
    ranks: RankGroup,
    heartbeat: Callable[[], None],
) -> None:
    """Write missing parts. Collective: every rank must call it, before the first optimizer step.

    Part p of the missing ones belongs to rank p mod world size. The batches of a part do not depend on the ranks, so
    its values are the same at any world size.

    Args:
        model: a transformers model, or a DeepSpeed engine's `module`, with the weights of the reference.
        dataset: rows with pairs, or with labelled answers.
        store: what is written.
        missing: the parts to write; the same on all ranks.
        pad_token_id: padding of `input_ids`.
        batch_size: rows per forward pass.
        ranks: the ranks that take part.
        heartbeat: called after each forward pass.
    """
    with evaluation_mode(model):
        for start in range(0, len(missing), ranks.world_size):
            logger.info("reference model: %d of %d parts are to be computed", len(missing) - start, store.num_parts)
            # A rank without a part repeats the last one: with ZeRO-3, all ranks gather weights in each forward pass.
            mine = start + ranks.rank
            part = missing[min(mine, len(missing) - 1)]
            values, pairs = [], []
            for ids in _batches(store, part, batch_size):
                batch = collate([dataset[sample_id] for sample_id in ids], "causal", pad_token_id, ids)
                values.append(both_log_probs(model, batch.to(model.device)).cpu().numpy())
                pairs.append(_pairs_of_rows(batch))
                heartbeat()
            if mine < len(missing):
                of_rows = np.concatenate(pairs)[: len(store.sample_ids(part))]
                store.write(part, np.concatenate(values)[: of_rows.sum()], of_rows)
    ranks.gather(None)  # all files exist when this returns


def _pairs_of_rows(batch: Batch) -> npt.NDArray[np.int64]:
    """Number of pairs of each row; 1 of labelled answers, which share a row with one mismatched answer."""
    rows = len(batch.sample_ids)
    return np.ones(rows, dtype=np.int64) if batch.pairs is None else batch.pairs.rows.bincount(minlength=rows).numpy()


def _batches(store: ReferenceLogProbs, part: int, batch_size: int) -> list[Sequence[int]]:
    """Sample ids of each forward pass of a part; every part has the same number of them, by repeating the last row."""
    ids = list(store.sample_ids(part))
    longest = len(store.sample_ids(0))
    ids += [ids[-1]] * (longest - len(ids))
    return [ids[start : start + batch_size] for start in range(0, longest, batch_size)]
