"""Packed pairs: every pair is in one row, and objectives, their statistics and gradients are those of single pairs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spotune_trainer.data.batches import Row, collate
from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.models.pretrained import load_tokenizer
from spotune_trainer.objectives.objective import Objective
from spotune_trainer.objectives.pair_log_probs import both_log_probs
from spotune_trainer.objectives.preference import Dpo, Orpo, SimPo
from spotune_trainer.objectives.reward import split_pairs
from tests.trainer.support.preference import PAIRS, preference_job
from tests.trainer.support.tiny import VOCABULARY

MAX_LENGTH = 256
MICRO_BATCH = 3


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[Row]]:
    """The rows of the same pairs, packed and not."""
    found: dict[bool, list[Row]] = {}
    for packing in (False, True):
        root = tmp_path_factory.mktemp("packed" if packing else "single")
        preference_job(root, "dpo", dataset={"packing": packing, "maxLength": MAX_LENGTH})
        dataset = ShardedDataset(str(root / "shards"), root / "cache")
        found[packing] = [dataset[number] for number in range(len(dataset))]
    return found


@pytest.fixture(scope="module")
def model() -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)).eval()


def pairs_of(row: Row) -> list[tuple[tuple[int, ...], ...]]:
    """Tokens and labels of both documents of each pair of a row."""
    lengths = row.get("pair_lengths", row.get("packed_pair_lengths"))
    places = np.cumsum(lengths)[:-1]
    documents = [
        (*map(int, ids), *map(int, labels))
        for ids, labels in zip(np.split(row["input_ids"], places), np.split(row["labels"], places), strict=True)
    ]
    return list(zip(documents[::2], documents[1::2], strict=True))


def test_every_pair_is_whole_in_one_row(shards: dict[bool, list[Row]]) -> None:
    packed = [pair for row in shards[True] for pair in pairs_of(row)]
    assert sorted(packed) == sorted(pair for row in shards[False] for pair in pairs_of(row))
    assert len(packed) == PAIRS
    assert len(shards[True]) < PAIRS / 3
    assert all(len(row["input_ids"]) <= 2 * MAX_LENGTH for row in shards[True])


def test_the_manifest_counts_pairs_rows_and_padding(tmp_path: Path) -> None:
    job = preference_job(tmp_path, "dpo", dataset={"packing": True, "maxLength": MAX_LENGTH})
    counts = json.loads((tmp_path / "shards" / "manifest.json").read_text())["splits"]["train"]
    rows = ShardedDataset(str(tmp_path / "shards"), tmp_path / "cache")
    assert (counts["documents"], counts["pairs"], counts["samples"]) == (PAIRS, PAIRS, len(rows))
    assert 0 < counts["padding"] < 0.1 < counts["unpackedPadding"] < 0.5
    in_parts = PrepareOptions(PrepareOptions.from_job(job).text, processes=1, part_size=1000)
    prepared = prepare([tmp_path / "pairs.jsonl"], tmp_path / "parts", in_parts, load_tokenizer(job))
    assert prepared.manifest["splits"]["train"]["pairs"] == PAIRS


def test_a_batch_has_the_pairs_of_packed_and_of_other_rows() -> None:
    ids = np.arange(1, 13)
    rows: list[Row] = [
        {"input_ids": ids[:5], "labels": ids[:5], "pair_lengths": np.array([2, 3])},
        {"input_ids": ids, "labels": ids, "packed_pair_lengths": np.array([2, 3, 5, 2])},
    ]
    batch = collate(rows, "causal", 0).to("cpu")
    assert batch.pairs is not None
    assert batch.pairs.rows.tolist() == [0, 1, 1]
    assert batch.pairs.starts.tolist() == [[0, 2], [0, 2], [5, 10]]
    assert batch.pairs.lengths.tolist() == [[2, 3], [2, 3], [5, 2]]
    assert batch.position_ids is not None
    assert batch.position_ids[1].tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 3, 4, 0, 1]
    assert split_pairs(batch, 0).tolist() == [
        [1, 2, 0, 0, 0],
        [1, 2, 0, 0, 0],
        [6, 7, 8, 9, 10],
        [3, 4, 5, 0, 0],
        [3, 4, 5, 0, 0],
        [11, 12, 0, 0, 0],
    ]


def test_log_probabilities_are_those_of_each_pair_alone(shards: dict[bool, list[Row]], model: Any) -> None:
    """Other pairs of the row, padding and micro-batches change nothing but the last digits."""
    alone = {}
    with torch.no_grad():
        for row in shards[False]:
            alone[pairs_of(row)[0]] = both_log_probs(model, collate([row], "causal", 0))[0]
        for size in (1, 5):
            rows = shards[True][:size]
            together = both_log_probs(model, collate(rows, "causal", 0, pad_to_multiple_of=128))
            expected = torch.stack([alone[pair] for row in rows for pair in pairs_of(row)])
            torch.testing.assert_close(together, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("objective", [Dpo(0.1, 0.1), Orpo(0.1), SimPo(2.0, 0.5)], ids=["dpo", "orpo", "simpo"])
def test_losses_statistics_and_gradients_equal_those_of_pairs_in_rows_of_their_own(
    shards: dict[bool, list[Row]], model: Any, objective: Objective
) -> None:
    single, packed = (_step(model, objective, shards[packing]) for packing in (False, True))
    assert packed["counts"] == single["counts"]
    assert packed["losses"] == pytest.approx(single["losses"], rel=1e-6)
    largest = max(map(abs, single["statistics"].values()))
    assert packed["statistics"] == pytest.approx(single["statistics"], rel=1e-6, abs=1e-6 * largest)
    for name, gradient in single["gradients"].items():
        torch.testing.assert_close(
            packed["gradients"][name], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max()), msg=name
        )


def _step(model: Any, objective: Objective, rows: Sequence[Row]) -> dict[str, Any]:
    """Losses, statistics and gradients of a step over all rows."""
    reference = np.array([-30.0, -40.0], dtype=np.float32)
    batches = [
        collate(each, "causal", 0, reference_log_probs=np.tile(reference, (sum(len(pairs_of(row)) for row in each), 1)))
        for each in (rows[start : start + MICRO_BATCH] for start in range(0, len(rows), MICRO_BATCH))
    ]
    counts = [sum(of_batches) for of_batches in zip(*(objective.counts(batch) for batch in batches), strict=True)]
    sums = [objective(model, batch) for batch in batches]
    model.zero_grad()
    losses = [torch.stack(of_batches).sum() for of_batches in zip(*(each.losses for each in sums), strict=True)]
    mean: Any = torch.stack([loss / count for loss, count in zip(losses, counts, strict=True)]).sum()
    mean.backward()
    totals = torch.stack([each.statistics for each in sums if each.statistics is not None]).sum(0)
    return {
        "counts": counts,
        "losses": [float(loss.detach()) for loss in losses],
        "statistics": objective.statistics.means(totals.tolist(), len(rows)),
        "gradients": {name: parameter.grad.clone() for name, parameter in model.named_parameters()},
    }
