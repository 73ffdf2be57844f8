"""Evaluation over all ranks: the loss over label tokens, and the metrics of greedy answers.

The samples are sorted by length and cut into batches that know nothing of ranks; batch b goes to rank b mod world
size, and ranks that run out repeat a row whose outcome is dropped, so that all do the same number of forwards (ZeRO-3
gathers weights in each). Outcomes are added exactly, so the figures are the same at any world size. Nothing random is
drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import distributed

from spotune.errors import JobError
from spotune_trainer.data.batches import NO_LOSS, Row, Task, collate, row_labels
from spotune_trainer.evaluation.custom_metrics import Metric
from spotune_trainer.evaluation.metrics import METRICS, build_metrics, mean_score
from spotune_trainer.models.decoding import aligned_config, generate_texts, greedy_config
from spotune_trainer.models.loss import summed_loss

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from spotune.job import FinetuneJob

T = TypeVar("T")

_SHOWN = 5


class Rows(Protocol):
    """Random access to tokenised rows; `ShardedDataset` is one."""

    @property
    def num_samples(self) -> int:
        """How many there are."""

    def __getitem__(self, sample_id: int) -> Row:
        """The row with this id."""


@dataclass(frozen=True)
class Prediction:
    """One answer beside what was asked and expected; `scores` by metric, None where the row does not count."""

    sample_id: int
    prompt: str
    prediction: str
    reference: str
    scores: Mapping[str, float | None]


@dataclass(frozen=True)
class EvaluationResult:
    """The figures of one evaluation, the same on every rank.

    Attributes:
        loss: mean cross-entropy over all label tokens, without label smoothing.
        samples: how many were evaluated.
        scores: share from 0 to 1 by metric, for a function of the user's the mean of its values, None where no row
            counted; empty unless answers were generated.
        predictions: the answers to the first few samples, in the order of their ids.
    """

    loss: float
    samples: int
    scores: Mapping[str, float | None] = field(default_factory=dict)
    predictions: tuple[Prediction, ...] = ()

    @property
    def exact_match(self) -> float | None:
        """Share of answers that are the reference; None if not asked for."""
        return self.scores.get("exactMatch")

    @property
    def execution_accuracy(self) -> float | None:
        """Share of queries that return the reference's rows; None if not asked for or if none counted."""
        return self.scores.get("executionAccuracy")

    @property
    def own_scores(self) -> dict[str, float | None]:
        """Those of the user's functions, by their names."""
        return {name: score for name, score in self.scores.items() if name not in METRICS}

    @property
    def known_scores(self) -> dict[str, float]:
        """Scores by metric, without those for which no row counted."""
        return {name: score for name, score in self.scores.items() if score is not None}


@dataclass(frozen=True)
class Ranks:
    """Who takes part: this process's rank, how many there are, and the group they exchange results in (None: all)."""

    rank: int = 0
    world_size: int = 1
    group: distributed.ProcessGroup | None = None

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, in the order of ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value, group=self.group)
        return values


@dataclass(frozen=True)
class _BatchOutcome:
    loss_sum: float
    tokens: int
    predictions: tuple[Prediction, ...] = ()


def evaluate(
    model: PreTrainedModel,
    dataset: Rows,
    tokenizer: PreTrainedTokenizerBase,
    job: FinetuneJob,
    *,
    batch_size: int,
    sample_ids: Sequence[int] | None = None,
    ranks: Ranks | None = None,
    zero_stage: int = 0,
    heartbeat: Callable[[], None] = lambda: None,
) -> EvaluationResult:
    """Evaluate on the samples of `dataset`, together with all other ranks.

    Args:
        model: a transformers model, or a DeepSpeed engine's `module`, on its device; its modes are put back afterwards.
        dataset: rows by sample id.
        tokenizer: of the model.
        job: says how: `training.evaluation`, `model.task`.
        batch_size: samples that go through the model at once, unless `evaluation.batchSize` is set.
        sample_ids: the samples to evaluate on; by default all. `evaluation.samples` takes the first of them.
        ranks: who takes part; by default this process alone.
        zero_stage: at 3, generation goes on until every rank is done.
        heartbeat: called for each row that is read and each token that is generated; what it raises ends everything.

    Raises:
        JobError: there is nothing to evaluate on, the rows lack what the metrics need, or a metric of the user's fails.
    """
    ranks = ranks or Ranks()
    settings = job.spec.training.evaluation
    ids = list(range(dataset.num_samples)) if sample_ids is None else [int(sample_id) for sample_id in sample_ids]
    if settings.samples:
        ids = ids[: settings.samples]
    if not ids:
        raise JobError("dataset.eval: the evaluation set is empty. Give another source, or a larger fraction.")
    batches = _cut(ids, _gather_lengths(dataset, ids, ranks, heartbeat), settings.batch_size or batch_size)
    evaluator = _Evaluator(model, tokenizer, job, ranks.world_size > 1 and zero_stage == 3, heartbeat)
    own: list[_BatchOutcome] = []
    with evaluating(model):
        for index in range(ranks.rank, math.ceil(len(batches) / ranks.world_size) * ranks.world_size, ranks.world_size):
            if index < len(batches):
                own.append(evaluator.run(dataset, batches[index]))
            else:
                evaluator.run(dataset, batches[-1][-1:])
    outcomes = [outcome for share in ranks.gather(own) for outcome in share]
    return _combine(outcomes, len(ids), list(evaluator.metrics))


class _Evaluator:
    """Turns one batch into its outcome."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        job: FinetuneJob,
        synced_gpus: bool,
        heartbeat: Callable[[], None],
    ) -> None:
        settings = job.spec.training.evaluation
        self.model = model
        self.tokenizer = tokenizer
        self.task: Task = job.spec.model.task
        self.synced_gpus = synced_gpus
        self.heartbeat = heartbeat
        self.metrics: dict[str, Metric] = build_metrics(settings) if settings.generate else {}
        self.generation: GenerationConfig | None = None
        if settings.generate:
            base = aligned_config(model, tokenizer, pretrained=job.spec.model.initialise == "pretrained")
            self.generation = greedy_config(base, settings.max_new_tokens)

    def run(self, dataset: Rows, ids: Sequence[int]) -> _BatchOutcome:
        rows = []
        for sample_id in ids:
            rows.append(dataset[sample_id])
            self.heartbeat()
        batch = collate(rows, self.task, int(self.tokenizer.pad_token_id), ids)
        loss_sum = float(summed_loss(self.model, batch.to(self.model.device)))
        self.heartbeat()
        return _BatchOutcome(loss_sum, batch.tokens, self._answer(ids, rows) if self.generation else ())

    def _answer(self, ids: Sequence[int], rows: Sequence[Row]) -> tuple[Prediction, ...]:
        assert self.generation is not None
        prompts = [_prompt(sample_id, row, self.task) for sample_id, row in zip(ids, rows, strict=True)]
        answers = generate_texts(
            self.model,
            self.tokenizer,
            prompts,
            self.generation,
            heartbeat=self.heartbeat,
            synced_gpus=self.synced_gpus,
        )
        predictions = []
        for sample_id, row, prompt, answer in zip(ids, rows, prompts, answers, strict=True):
            reference = str(row["completion"])
            columns = {name: value for name, value in row.items() if isinstance(value, str)}
            scores = {name: metric(answer, reference, columns) for name, metric in self.metrics.items()}
            text = str(self.tokenizer.decode(prompt, skip_special_tokens=True))
            predictions.append(Prediction(sample_id, text, answer, reference, scores))
            self.heartbeat()
        return tuple(predictions)


def _gather_lengths(dataset: Rows, ids: Sequence[int], ranks: Ranks, heartbeat: Callable[[], None]) -> list[int]:
    """Tokens of each sample, inputs and labels; each rank reads its share."""
    own = []
    for sample_id in ids[ranks.rank :: ranks.world_size]:
        row = dataset[sample_id]
        own.append(len(row["input_ids"]) + len(row_labels(row)))
        heartbeat()
    lengths = [0] * len(ids)
    for rank, share in enumerate(ranks.gather(own)):
        lengths[rank :: ranks.world_size] = share
    return lengths


def _cut(ids: Sequence[int], lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Batches of samples of like length, the longest first, so that what does not fit in memory fails at once."""
    ordered = [sample_id for _, sample_id in sorted(zip((-length for length in lengths), ids, strict=True))]
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]


def _prompt(sample_id: int, row: Row, task: Task) -> list[int]:
    """The tokens to be answered: all inputs of a seq2seq row, those before the last answer of a causal one."""
    if "completion" not in row or len(row.get("lengths", ())) > 1:
        what = "is packed of several documents" if "completion" in row else "has no column completion"
        raise JobError(
            f"training.evaluation.generate: evaluation sample {sample_id} {what}, so there is nothing to answer. Make "
            "the shards from prompt and completion or from messages, without packing, or set generate: false."
        )
    tokens = np.asarray(row["input_ids"], dtype=np.int64)
    if task == "causal":
        answered = (row_labels(row) != NO_LOSS).astype(np.int8)
        starts = np.flatnonzero(np.diff(answered, prepend=0) == 1)
        tokens = tokens[: int(starts[-1])] if starts.size else tokens
    if not tokens.size:
        raise JobError(
            f"training.evaluation.generate: the prompt of evaluation sample {sample_id} is empty. Give the rows a "
            "prompt that carries no loss, or set generate: false."
        )
    prompt: list[int] = tokens.tolist()
    return prompt


def _combine(outcomes: Sequence[_BatchOutcome], samples: int, metrics: Sequence[str]) -> EvaluationResult:
    tokens = sum(outcome.tokens for outcome in outcomes)
    if not tokens:
        raise JobError("dataset.eval: no evaluation row has a label token; completions are empty or cut by maxLength.")
    predictions = [prediction for outcome in outcomes for prediction in outcome.predictions]
    return EvaluationResult(
        # fsum is exact: the order, and with it the number of ranks, does not matter.
        loss=math.fsum(outcome.loss_sum for outcome in outcomes) / tokens,
        samples=samples,
        scores={name: mean_score([prediction.scores[name] for prediction in predictions]) for name in metrics},
        predictions=tuple(sorted(predictions, key=lambda prediction: prediction.sample_id)[:_SHOWN]),
    )


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards each module has the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
