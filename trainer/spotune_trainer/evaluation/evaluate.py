"""Evaluation on all ranks: the loss of the job's objective, and metrics of greedily decoded answers.

The samples are sorted by length and split into batches, independently of the ranks, which share them (`ranks.py`).
Results are summed exactly (`math.fsum`) and no random numbers are drawn, so the result is the same at any world size.

If the loss of a sample depends on other samples, all batches of the evaluation set, or of a source of a mixture, run
twice: the first pass computes what each sample's loss needs to know of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from spotune.errors import JobError
from spotune_trainer.data.batches import NO_LOSS, Batch, Row, StepFeatures, Task, Tokens, collate, row_labels
from spotune_trainer.evaluation.custom_metrics import Metric
from spotune_trainer.evaluation.label_scores import LabelScorer, label_scorer
from spotune_trainer.evaluation.metrics import METRICS, build_metrics, mean_score
from spotune_trainer.evaluation.ranks import RankGroup, evaluation_mode, run_batches
from spotune_trainer.models.decoding import generate_texts, generation_config_with_special_tokens, greedy_config
from spotune_trainer.objectives.build import evaluation_objective
from spotune_trainer.objectives.objective import Statistics, StepObjective, mean_loss
from spotune_trainer.objectives.reference import PairLookup

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from spotune.job import FinetuneJob

_MAX_KEPT_PREDICTIONS = 5


class Rows(Protocol):
    """Random access to tokenized rows, such as `ShardedDataset`."""

    @property
    def num_samples(self) -> int:
        """Number of rows."""

    def __getitem__(self, sample_id: int) -> Row:
        """The row with this id."""


@dataclass(frozen=True)
class Prediction:
    """A generated answer with its prompt and reference.

    Attributes:
        sample_id: id of the sample in the dataset.
        prompt: the prompt's text.
        prediction: the generated answer.
        reference: the expected answer.
        scores: score by metric; None if the row does not count for that metric.
    """

    sample_id: int
    prompt: str
    prediction: str
    reference: str
    scores: Mapping[str, float | None]


@dataclass(frozen=True)
class EvaluationResult:
    """The result of one evaluation, the same on every rank.

    Attributes:
        loss: mean cross-entropy over all label tokens, without label smoothing; for other objectives, their loss.
        samples: number of samples evaluated.
        scores: mean score by metric. Built-in metrics are from 0 to 1. None if no row counted; empty if no answers were
            generated. Preference objectives have their statistics here, such as `rewardAccuracy`, and classifiers the
            scores of their labels.
        predictions: the five answers with the lowest sample ids.
        by_source: the result of each source of a mixture; empty without a mixture.
    """

    loss: float
    samples: int
    scores: Mapping[str, float | None] = field(default_factory=dict)
    predictions: tuple[Prediction, ...] = ()
    by_source: Mapping[str, EvaluationResult] = field(default_factory=dict)

    @property
    def exact_match(self) -> float | None:
        """Fraction of answers that equal the reference; None if the job does not use this metric."""
        return self.scores.get("exactMatch")

    @property
    def execution_accuracy(self) -> float | None:
        """Fraction of queries that return the reference's rows; None if the metric is not used or no row counted."""
        return self.scores.get("executionAccuracy")

    @property
    def custom_scores(self) -> dict[str, float | None]:
        """Scores of the user's functions, by metric name."""
        return {name: score for name, score in self.scores.items() if name not in METRICS}

    @property
    def defined_scores(self) -> dict[str, float]:
        """Scores by metric, without those that are None."""
        return {name: score for name, score in self.scores.items() if score is not None}

    @property
    def values_by_source(self) -> dict[str, dict[str, float]]:
        """Loss and scores of each source of a mixture; empty without a mixture."""
        return {name: {"loss": each.loss, **each.defined_scores} for name, each in self.by_source.items()}


@dataclass(frozen=True)
class _BatchResult:
    losses: tuple[float, ...]
    counts: tuple[int, ...]
    statistics: tuple[float, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    label_counts: tuple[int, ...] = ()


def evaluate(
    model: PreTrainedModel,
    dataset: Rows,
    tokenizer: PreTrainedTokenizerBase,
    job: FinetuneJob,
    *,
    batch_size: int,
    sample_ids: Sequence[int] | None = None,
    sources: Mapping[str, Sequence[int]] | None = None,
    ranks: RankGroup | None = None,
    zero_stage: int = 0,
    heartbeat: Callable[[], None] = lambda: None,
    reference_log_probs: PairLookup | None = None,
) -> EvaluationResult:
    """Evaluate the model on samples of `dataset`. Collective: every rank must call it.

    Args:
        model: a transformers model, or a DeepSpeed engine's `module`, on its device. The training or evaluation mode of
            each module is restored afterwards.
        dataset: rows by sample id.
        tokenizer: the model's tokenizer.
        job: its `training.evaluation` and `model.task` are used.
        batch_size: samples per forward pass.
        sample_ids: the samples to evaluate on; by default all. `evaluation.samples` limits them to the first ones.
        sources: the samples of each source of a mixture, instead of `sample_ids`; the result then has `by_source`, too.
            `evaluation.samples` limits each source to its first ones.
        ranks: the ranks that take part; by default this process alone.
        zero_stage: at stage 3, every rank generates until the last rank has finished.
        heartbeat: called for each row read and each token generated. An exception that it raises stops the evaluation.
        reference_log_probs: of the samples, for objectives with a reference model.

    Raises:
        JobError: there are no samples, the rows lack a column that a metric needs, or a function of the user fails.
    """
    ranks = ranks or RankGroup()
    settings = job.spec.training.evaluation
    evaluator = _Evaluator(
        model, tokenizer, job, ranks.world_size > 1 and zero_stage == 3, heartbeat, reference_log_probs
    )
    groups = sources or {"": range(dataset.num_samples) if sample_ids is None else sample_ids}
    results: dict[str, list[_BatchResult]] = {}
    counts: dict[str, int] = {}
    for name, group in groups.items():
        ids = [int(sample_id) for sample_id in group][: settings.samples or None]
        if not ids:
            raise JobError("dataset.eval: the evaluation set is empty. Set another source, or a larger fraction.")
        counts[name] = len(ids)
        results[name] = _evaluate_samples(evaluator, dataset, ids, batch_size, ranks)
    combine = partial(
        _combine,
        metrics=list(evaluator.metrics),
        statistics=evaluator.objective.statistics,
        scorer=evaluator.scorer,
    )
    total = combine([result for of_source in results.values() for result in of_source], sum(counts.values()))
    if not sources:
        return total
    return replace(total, by_source={name: combine(results[name], counts[name]) for name in sources})


def _evaluate_samples(
    evaluator: _Evaluator, dataset: Rows, ids: Sequence[int], batch_size: int, ranks: RankGroup
) -> list[_BatchResult]:
    """The results of all batches of some samples, from all ranks."""
    batches = _make_batches(ids, _gather_lengths(dataset, ids, ranks, evaluator.heartbeat), batch_size)
    with evaluation_mode(evaluator.model):
        values = None
        if isinstance(evaluator.objective, StepObjective):
            features = partial(evaluator.features, evaluator.objective, dataset)
            values = torch.cat(run_batches(features, batches, ranks)).to(evaluator.model.device)
        return run_batches(partial(evaluator.run, values, dataset, batch_size), batches, ranks)


class _Evaluator:
    """Computes the loss, the answers and their scores for one batch."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        job: FinetuneJob,
        synced_gpus: bool,
        heartbeat: Callable[[], None],
        reference_log_probs: PairLookup | None,
    ) -> None:
        settings = job.spec.training.evaluation
        self.model = model
        self.tokenizer = tokenizer
        self.task: Task = job.spec.model.task
        self.synced_gpus = synced_gpus
        self.heartbeat = heartbeat
        self.objective = evaluation_objective(job.spec.training)
        self.scorer = label_scorer(job)
        self.reference_log_probs = reference_log_probs
        self.metrics: dict[str, Metric] = build_metrics(settings) if settings.generate else {}
        self.generation: GenerationConfig | None = None
        if settings.generate:
            base = generation_config_with_special_tokens(
                model, tokenizer, pretrained=job.spec.model.initialise == "pretrained"
            )
            self.generation = greedy_config(base, settings.max_new_tokens)

    def features(self, objective: StepObjective, dataset: Rows, ids: Sequence[int], _: int) -> torch.Tensor:
        """Features of the samples of a batch, on the host."""
        batch = self._collate(self._read(dataset, ids), ids)
        found = objective.features(self.model, batch.to(self.model.device)).cpu()
        self.heartbeat()
        return found

    def run(
        self, features: torch.Tensor | None, dataset: Rows, batch_size: int, ids: Sequence[int], index: int
    ) -> _BatchResult:
        rows = self._read(dataset, ids)
        batch = self._collate(rows, ids)
        if features is not None:
            batch = replace(batch, step_features=StepFeatures(features, index * batch_size))
        sums = self.objective(self.model, batch.to(self.model.device))
        self.heartbeat()
        return _BatchResult(
            losses=tuple(map(float, sums.losses)),
            counts=self.objective.counts(batch),
            statistics=() if sums.statistics is None else tuple(sums.statistics.tolist()),
            predictions=self._answer(ids, rows) if self.generation else (),
            label_counts=()
            if self.scorer is None or sums.predictions is None
            else self.scorer.count(sums.predictions.cpu().numpy(), batch.labels.numpy()),
        )

    def _read(self, dataset: Rows, ids: Sequence[int]) -> list[Row]:
        rows = []
        for sample_id in ids:
            rows.append(dataset[sample_id])
            self.heartbeat()
        return rows

    def _collate(self, rows: Sequence[Row], ids: Sequence[int]) -> Batch:
        reference = self.reference_log_probs(np.asarray(ids)) if self.reference_log_probs else None
        return collate(rows, self.task, int(self.tokenizer.pad_token_id), ids, reference_log_probs=reference)

    def _answer(self, ids: Sequence[int], rows: Sequence[Row]) -> tuple[Prediction, ...]:
        assert self.generation is not None
        prompts = [_prompt(sample_id, row, self.task, self.tokenizer) for sample_id, row in zip(ids, rows, strict=True)]
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


def _gather_lengths(dataset: Rows, ids: Sequence[int], ranks: RankGroup, heartbeat: Callable[[], None]) -> list[int]:
    """Tokens of each sample, inputs plus labels. Each rank reads 1/world_size of the rows."""
    local = []
    for sample_id in ids[ranks.rank :: ranks.world_size]:
        row = dataset[sample_id]
        local.append(len(row["input_ids"]) + len(row_labels(row)))
        heartbeat()
    lengths = [0] * len(ids)
    for rank, of_rank in enumerate(ranks.gather(local)):
        lengths[rank :: ranks.world_size] = of_rank
    return lengths


def _make_batches(ids: Sequence[int], lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Batches of samples of similar length, longest first, so that an out-of-memory error comes at once."""
    ordered = [sample_id for _, sample_id in sorted(zip((-length for length in lengths), ids, strict=True))]
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]


def _prompt(sample_id: int, row: Row, task: Task, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The prompt's tokens: all inputs of a seq2seq row, or the tokens before the last answer of a causal row."""
    if "completion" not in row or len(row.get("lengths", ())) > 1:
        problem = "packs several documents" if "completion" in row else "has no column completion"
        raise JobError(
            f"training.evaluation.generate: evaluation sample {sample_id} {problem}, so it has no prompt. Write the "
            "shards from prompt and completion or from messages, without packing, or set generate: false."
        )
    tokens = np.asarray(row["input_ids"], dtype=np.int64)
    if task == "causal":
        tokens = tokens[: _last_answer(tokens, row_labels(row), tokenizer)]
    if not tokens.size:
        raise JobError(
            f"training.evaluation.generate: the prompt of evaluation sample {sample_id} is empty. Give the rows a "
            "prompt without loss, or set generate: false."
        )
    prompt: list[int] = tokens.tolist()
    return prompt


def _last_answer(tokens: Tokens, labels: Tokens, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Index of the first token of the last answer; None without labels.

    The end-of-text token after an answer belongs to it, also after whitespace without a label.
    """
    edges = np.flatnonzero(np.diff((labels != NO_LOSS).astype(np.int8), prepend=0, append=0))
    starts: list[int] = edges[::2].tolist()
    stops: list[int] = edges[1::2].tolist()
    if len(starts) > 1 and tokens[starts[-1] : stops[-1]].tolist() == [tokenizer.eos_token_id]:
        between = str(tokenizer.decode(tokens[stops[-2] : starts[-1]].tolist()))
        return starts[-1] if between.strip() else starts[-2]
    return starts[-1] if starts else None


def _combine(
    results: Sequence[_BatchResult],
    samples: int,
    metrics: Sequence[str],
    statistics: Statistics,
    scorer: LabelScorer | None,
) -> EvaluationResult:
    counts = [sum(of_batches) for of_batches in zip(*(result.counts for result in results), strict=True)]
    if not all(counts):
        raise JobError(
            "dataset.eval: no evaluation row has a label token: completions are empty, or truncated by maxLength."
        )
    predictions = [prediction for result in results for prediction in result.predictions]
    # fsum is exact, so the order, and with it the number of ranks, does not matter.
    losses = [math.fsum(of_batches) for of_batches in zip(*(result.losses for result in results), strict=True)]
    sums = [math.fsum(of_batches) for of_batches in zip(*(result.statistics for result in results), strict=True)]
    label_counts = tuple(sum(of_batches) for of_batches in zip(*(r.label_counts for r in results), strict=True))
    return EvaluationResult(
        loss=mean_loss(losses, counts),
        samples=samples,
        scores={name: mean_score([prediction.scores[name] for prediction in predictions]) for name in metrics}
        | dict(statistics.means(sums, samples))
        | (scorer.scores(label_counts) if scorer is not None else {}),
        predictions=tuple(sorted(predictions, key=lambda prediction: prediction.sample_id)[:_MAX_KEPT_PREDICTIONS]),
    )
