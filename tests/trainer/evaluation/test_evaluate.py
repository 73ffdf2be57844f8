"""Evaluation: the same result at any world size, and no effect on training."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune_trainer.data.batches import Task, collate
from spotune_trainer.engine.build import EngineConfig, build_engine
from spotune_trainer.evaluation.evaluate import EvaluationResult, evaluate
from spotune_trainer.evaluation.ranks import RankGroup
from spotune_trainer.models.loss import summed_loss
from spotune_trainer.models.pretrained import build_model, load_tokenizer
from tests.trainer.support.groups import run_group
from tests.trainer.support.tiny import ListedRows, make_job, make_rows, save_source

TASKS: list[Task] = ["seq2seq", "causal"]
ROWS = 13

Loaded = tuple[FinetuneJob, PreTrainedModel, PreTrainedTokenizerBase, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[Task, Path]:
    return {task: save_source(tmp_path_factory.mktemp(task), task) for task in TASKS}


def load(source: Path, task: Task, **evaluation: Any) -> Loaded:
    job = make_job(source, task, training={"epochs": 1, "seed": 7, "evaluation": evaluation})
    tokenizer = load_tokenizer(job)
    return job, build_model(job), tokenizer, make_rows(tokenizer, task, ROWS)


def generating(**values: Any) -> dict[str, Any]:
    return {"generate": True, "metrics": ["loss", "exactMatch"], "maxNewTokens": 6, **values}


@pytest.mark.parametrize("task", TASKS)
def test_loss_is_the_mean_over_label_tokens_not_over_batches(sources: dict[Task, Path], task: Task) -> None:
    job, model, tokenizer, rows = load(sources[task], task)
    result = evaluate(model, ListedRows(rows), tokenizer, job, batch_size=4)
    model.eval()
    total = tokens = 0.0
    for row in rows:
        batch = collate([row], task, 0)
        with torch.no_grad():
            total += float(model(**batch.model_inputs()).loss) * batch.loss_tokens
        tokens += batch.loss_tokens
    assert result.loss == pytest.approx(total / tokens, rel=1e-6)
    assert result.samples == ROWS
    assert result.predictions == ()
    assert result.exact_match is None
    assert result.execution_accuracy is None


def evaluate_rank(
    rank: int, world_size: int, source: Path, task: Task, zero_stage: int
) -> tuple[EvaluationResult, int]:
    job, model, tokenizer, rows = load(source, task, **generating())
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    result = evaluate(
        model,
        ListedRows(rows),
        tokenizer,
        job,
        batch_size=4,
        ranks=RankGroup(rank, world_size),
        zero_stage=zero_stage,
    )
    return result, len(forwards)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "world_size", "zero_stage"), [("seq2seq", 2, 3), ("causal", 2, 1), ("seq2seq", 3, 3)])
def test_results_are_the_same_at_any_world_size(
    sources: dict[Task, Path], task: Task, world_size: int, zero_stage: int
) -> None:
    alone, _ = evaluate_rank(0, 1, sources[task], task, 0)
    results = run_group(world_size, evaluate_rank, sources[task], task, zero_stage)
    # Batches of 4, 4, 4 and 1 rows: with three ranks, two ranks run a batch whose result is discarded.
    assert [result for result, _ in results] == [alone] * world_size
    if zero_stage == 3:
        assert len({forwards for _, forwards in results}) == 1


def tenths_of_the_reference(answer: str, reference: str, columns: Mapping[str, str]) -> float | None:
    """A metric as a user may write it; odd rows do not count."""
    assert columns["database"] == "concert"
    assert set(columns) == {"completion", "database"}
    return None if int(reference[-1]) % 2 else len(reference) / 10 + int(reference.split()[-1])


def evaluate_custom_metric(rank: int, world_size: int, source: Path) -> EvaluationResult:
    metric = f"{__name__}:{tenths_of_the_reference.__name__}"
    job, model, tokenizer, rows = load(source, "seq2seq", **generating(metrics=["exactMatch", metric], batchSize=2))
    return evaluate(model, ListedRows(rows), tokenizer, job, batch_size=4, ranks=RankGroup(rank, world_size))


@pytest.mark.long
@pytest.mark.slow
def test_a_custom_metric_is_averaged_exactly_at_any_world_size(sources: dict[Task, Path]) -> None:
    alone = evaluate_custom_metric(0, 1, sources["seq2seq"])
    assert run_group(3, evaluate_custom_metric, sources["seq2seq"]) == [alone] * 3
    counted = [len(f"SELECT count(*) FROM singer WHERE age > {n}") / 10 + n for n in range(0, ROWS, 2)]
    assert alone.custom_scores == {"tenths_of_the_reference": math.fsum(counted) / len(counted)}
    assert alone.defined_scores == {"exactMatch": 0.0, **alone.custom_scores}
    assert [prediction.scores["tenths_of_the_reference"] for prediction in alone.predictions[:2]] == [4.1, None]


def train_rank(
    rank: int, world_size: int, source: Path, zero_stage: int, evaluated: bool
) -> tuple[list[float], EvaluationResult | None]:
    """Two training steps, optionally with an evaluation in between; returns this rank's losses and the result."""
    job, model, tokenizer, rows = load(source, "seq2seq", **generating(maxNewTokens=3, samples=5, batchSize=2))
    config = EngineConfig(zero_stage, 1, 1, torch.float32, gradient_checkpointing=False)
    engine = build_engine(model, job.spec.training, config)
    engine.train()
    losses, result = [], None
    for step in range(2):
        torch.manual_seed(step)
        loss = summed_loss(engine, collate([rows[rank]], "seq2seq", 0))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if evaluated and step == 0:
            result = evaluate(
                engine.module,
                ListedRows(rows),
                tokenizer,
                job,
                batch_size=4,
                ranks=RankGroup(rank, world_size),
                zero_stage=engine.zero_optimization_stage(),
            )
    return losses, result


@pytest.mark.slow
def test_evaluation_with_zero_3_equals_stage_0_and_leaves_training_unchanged(sources: dict[Task, Path]) -> None:
    source = sources["seq2seq"]
    sharded = run_group(2, train_rank, source, 3, True)
    whole = run_group(2, train_rank, source, 0, True)
    unevaluated = run_group(2, train_rank, source, 3, False)
    (_, result), (_, reference) = sharded[0], whole[0]
    assert result.loss == pytest.approx(reference.loss, rel=1e-6)
    assert result.predictions == reference.predictions
    assert sharded[1][1] == result
    assert [losses for losses, _ in sharded] == [losses for losses, _ in unevaluated]


@pytest.mark.slow
def test_every_rank_runs_a_batch_even_if_there_are_fewer_batches_than_ranks(sources: dict[Task, Path]) -> None:
    results = run_group(3, evaluate_few, sources["seq2seq"])
    assert len({result.loss for result, _ in results}) == 1
    assert [forwards for _, forwards in results] == [1, 1, 1]


def evaluate_few(rank: int, world_size: int, source: Path) -> tuple[EvaluationResult, int]:
    job, model, tokenizer, rows = load(source, "seq2seq", samples=3)
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    result = evaluate(model, ListedRows(rows), tokenizer, job, batch_size=4, ranks=RankGroup(rank, world_size))
    return result, len(forwards)


@pytest.mark.parametrize("task", TASKS)
def test_a_model_that_memorized_the_answers_scores_one(sources: dict[Task, Path], task: Task) -> None:
    job, model, tokenizer, rows = load(sources[task], task, **generating(maxNewTokens=24))
    rows = rows[:2]
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    inputs = collate(rows, task, 0).model_inputs()
    model.eval()
    for _ in range(150):
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()
    result = evaluate(model, ListedRows(rows), tokenizer, job, batch_size=4)
    assert result.exact_match == 1.0
    assert [prediction.prediction for prediction in result.predictions] == [row["completion"] for row in rows]
    assert result.predictions[1].prompt == "how many singers are there ? how many singers are there ? 1"
    assert result.predictions[0].scores == {"exactMatch": True}


def test_queries_run_in_the_database_named_by_the_row(sources: dict[Task, Path], tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "concert.sqlite")) as connection:
        connection.execute("CREATE TABLE singer (age INTEGER)")
        connection.commit()
    sql = {"databases": str(tmp_path)}
    job, model, tokenizer, rows = load(
        sources["seq2seq"], "seq2seq", **generating(metrics=["executionAccuracy"], sql=sql, batchSize=5)
    )
    result = evaluate(model, ListedRows(rows), tokenizer, job, batch_size=4)
    assert result.execution_accuracy == 0.0
    assert result.exact_match is None
    with pytest.raises(JobError, match=r"no file opera\.sqlite"):
        evaluate(model, ListedRows([{**rows[0], "database": "opera"}]), tokenizer, job, batch_size=4)


def test_only_the_requested_samples_are_read(sources: dict[Task, Path]) -> None:
    job, model, tokenizer, rows = load(sources["seq2seq"], "seq2seq", samples=2)
    dataset = ListedRows(rows)
    result = evaluate(model, dataset, tokenizer, job, batch_size=4, sample_ids=[4, 9, 11])
    assert set(dataset.read) == {4, 9}
    assert result.samples == 2


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_source_of_a_mixture_has_its_own_result_beside_the_total(
    sources: dict[Task, Path], world_size: int
) -> None:
    by_source = {"sql": [1, 4, 9, 12], "chat": [0, 2, 3]}
    job, model, tokenizer, rows = load(sources["seq2seq"], "seq2seq", **generating())
    results = run_group(world_size, evaluate_sources, sources["seq2seq"], by_source)
    assert results == [results[0]] * world_size
    (found, *_) = results
    for name, ids in by_source.items():
        alone = evaluate(model, ListedRows(rows), tokenizer, job, batch_size=4, sample_ids=ids)
        assert found.by_source[name] == alone
        assert alone.by_source == {}
    together = evaluate(model, ListedRows(rows), tokenizer, job, batch_size=4, sample_ids=[0, 1, 2, 3, 4, 9, 12])
    assert found.loss == pytest.approx(together.loss, rel=1e-6)
    assert found.samples == 7
    assert found.exact_match == together.exact_match
    assert [prediction.sample_id for prediction in found.predictions] == [0, 1, 2, 3, 4]


def evaluate_sources(rank: int, world_size: int, source: Path, by_source: Mapping[str, list[int]]) -> EvaluationResult:
    job, model, tokenizer, rows = load(source, "seq2seq", **generating())
    ranks = RankGroup(rank, world_size)
    return evaluate(model, ListedRows(rows), tokenizer, job, batch_size=4, sources=by_source, ranks=ranks)


def test_the_limit_of_samples_holds_for_each_source(sources: dict[Task, Path]) -> None:
    job, model, tokenizer, rows = load(sources["seq2seq"], "seq2seq", samples=1)
    dataset = ListedRows(rows)
    result = evaluate(model, dataset, tokenizer, job, batch_size=4, sources={"sql": [4, 9], "chat": [7, 8]})
    assert set(dataset.read) == {4, 7}
    assert {name: each.samples for name, each in result.by_source.items()} == {"sql": 1, "chat": 1}


def test_evaluation_leaves_training_unchanged(sources: dict[Task, Path]) -> None:
    job, model, tokenizer, rows = load(sources["causal"], "causal", **generating())
    model.train()
    frozen = model.model.layers[0].mlp
    frozen.eval()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    evaluate(model, ListedRows(rows), tokenizer, job, batch_size=8)
    assert torch.equal(torch.get_rng_state(), before)
    assert {module for module in model.modules() if not module.training} == set(frozen.modules())
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())


class StoppedError(Exception):
    """Raised by the heartbeat."""


def test_an_exception_of_the_heartbeat_stops_the_evaluation(sources: dict[Task, Path]) -> None:
    job, model, tokenizer, rows = load(sources["seq2seq"], "seq2seq", **generating(maxNewTokens=200))
    beats = 0

    def beat() -> None:
        nonlocal beats
        beats += 1
        if beats == 40:
            raise StoppedError

    model.train()
    with pytest.raises(StoppedError):
        evaluate(model, ListedRows(rows), tokenizer, job, batch_size=32, heartbeat=beat)
    assert model.training
    assert torch.is_grad_enabled()
    assert beats == 40


def drop(*names: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    return lambda row: {name: value for name, value in row.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("completion"), "sample 0 has no column completion.*set generate: false"),
        (drop("labels"), "the prompt of evaluation sample 0 is empty"),
        (
            lambda row: {**row, "lengths": np.array([3, len(row["input_ids"]) - 3])},
            "sample 0 packs several documents",
        ),
    ],
)
def test_rows_without_a_prompt_are_rejected(
    sources: dict[Task, Path], change: Callable[[Mapping[str, Any]], dict[str, Any]], message: str
) -> None:
    job, model, tokenizer, rows = load(sources["causal"], "causal", **generating())
    with pytest.raises(JobError, match=message):
        evaluate(model, ListedRows([change(rows[0])]), tokenizer, job, batch_size=4)


def test_the_last_answer_of_a_chat_is_generated(sources: dict[Task, Path]) -> None:
    job, model, tokenizer, rows = load(sources["causal"], "causal", **generating())
    row = rows[0]
    first = {name: row[name].tolist() for name in ("input_ids", "labels")}
    turns = {name: torch.tensor(tokens * 2 + [2]).numpy() for name, tokens in first.items()}
    turns["labels"][-1] = -100
    result = evaluate(model, ListedRows([{**row, **turns}]), tokenizer, job, batch_size=4)
    question = "how many singers are there ? 0"
    assert result.predictions[0].prompt == f"{question}{row['completion']}{question}"


@pytest.mark.parametrize(("between", "ends_with_answer"), [(" ", False), (" how", True)])
def test_an_end_of_text_token_after_whitespace_belongs_to_the_answer(
    sources: dict[Task, Path], between: str, ends_with_answer: bool
) -> None:
    """The model learns no whitespace between the token that ends a turn and the end-of-text token."""
    job, model, tokenizer, rows = load(sources["causal"], "causal", **generating())
    row, eos = rows[0], tokenizer.eos_token_id
    gap = tokenizer(between, add_special_tokens=False)["input_ids"]
    assert gap
    row["input_ids"] = np.concatenate([row["input_ids"], gap, [eos]])
    row["labels"] = np.concatenate([row["labels"], [-100] * len(gap), [eos]])
    result = evaluate(model, ListedRows([row]), tokenizer, job, batch_size=4)
    question = "how many singers are there ? 0"
    assert result.predictions[0].prompt == (f"{question}{row['completion']}{between}" if ends_with_answer else question)


def test_an_empty_evaluation_set_is_an_error(sources: dict[Task, Path]) -> None:
    job, model, tokenizer, rows = load(sources["seq2seq"], "seq2seq")
    with pytest.raises(JobError, match=r"dataset.eval: the evaluation set is empty"):
        evaluate(model, ListedRows(rows), tokenizer, job, batch_size=4, sample_ids=[])
    empty = {**rows[0], "labels": rows[0]["labels"] * 0 - 100}
    with pytest.raises(JobError, match="no evaluation row has a label token"):
        evaluate(model, ListedRows([empty]), tokenizer, job, batch_size=4)
