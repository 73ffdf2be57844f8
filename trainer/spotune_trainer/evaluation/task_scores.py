"""Scores of lm-evaluation-harness for a model in training, by forward passes of all ranks.

The harness runs in a process beside rank 0, without the model (`harness_model.py`). Rank 0 hands its questions to all
ranks. A question has all requests of one kind, so it is cut into batches of similar length that do not depend on the
ranks, which share them (`ranks.py`): scores are the same at any world size. No random numbers are drawn.

    process of the harness --question--> rank 0 --broadcast--> batches on all ranks --gather--> rank 0 --> answer

While the harness works on its own, rank 0 broadcasts every few seconds that there is no question yet, so all ranks have
a heartbeat.
"""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from spotune.errors import JobError, SpotuneError
from spotune.job import HarnessSpec
from spotune_trainer.evaluation.harness import FIELD, HarnessProcess, harness_scores
from spotune_trainer.evaluation.log_likelihoods import LogLikelihood, Tokens, log_likelihoods
from spotune_trainer.evaluation.ranks import RankGroup, evaluation_mode, run_batches
from spotune_trainer.models.decoding import generate_tokens, generation_config_with_special_tokens, greedy_config

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")
Row = TypeVar("Row")

_SECONDS_BETWEEN_BROADCASTS = 2.0


@dataclass(frozen=True)
class TaskScores:
    """The scores of one evaluation by their name, the same on every rank; or the problem, why there are none."""

    scores: Mapping[str, float] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class _LogLikelihoods:
    """Asks for the log-likelihood of the target of each pair of inputs and target (see `log_likelihoods`)."""

    pairs: Sequence[tuple[Tokens, Tokens]]


@dataclass(frozen=True)
class _Generate:
    """Asks for a greedily decoded answer to each prompt.

    Attributes:
        prompts: token ids.
        stop: texts that end an answer.
        max_new_tokens: of each answer. That of a seq2seq model may be longer by the longest prompt of its batch: so it
            is in the harness's own class, which counts the prompt for all models.
        options: further fields of the generation configuration.
    """

    prompts: Sequence[Tokens]
    stop: Sequence[str]
    max_new_tokens: int
    options: Mapping[str, Any]


_Question: TypeAlias = _LogLikelihoods | _Generate


def score_tasks(
    spec: HarnessSpec,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    pretrained: bool,
    batch_size: int,
    ranks: RankGroup | None = None,
    zero_stage: int = 0,
    heartbeat: Callable[[], None] = lambda: None,
    silent_seconds: float = 1800.0,
) -> TaskScores:
    """Evaluate the model on tasks of lm-evaluation-harness. Collective: every rank must call it.

    Args:
        spec: the tasks.
        model: a language model, or a DeepSpeed engine's `module`, on its device. The training or evaluation mode of
            each module is restored afterwards.
        tokenizer: the model's tokenizer.
        pretrained: whether the model was not initialized at random; see `generation_config_with_special_tokens`.
        batch_size: requests per forward pass.
        ranks: the ranks that take part; by default this process alone.
        zero_stage: at stage 3, every rank generates until the last rank has finished.
        heartbeat: called for each forward pass, and while the harness works on its own. An exception that it raises
            stops the evaluation.
        silent_seconds: a harness that asks nothing for so long has failed.
    """
    ranks = ranks or RankGroup()
    answers = _Answers(
        model,
        tokenizer,
        base=generation_config_with_special_tokens(model, tokenizer, pretrained=pretrained),
        batch_size=batch_size,
        ranks=ranks,
        synced_gpus=ranks.world_size > 1 and zero_stage == 3,
        heartbeat=heartbeat,
    )
    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model))
        harness = stack.enter_context(_Harness(spec, model, tokenizer, silent_seconds)) if ranks.rank == 0 else None
        while True:
            received = ranks.broadcast(harness.receive() if harness else None)
            heartbeat()
            if isinstance(received, TaskScores):
                return received
            if received is not None:
                answer = answers.to(received)
                if harness:
                    harness.answer(answer)


class _Harness:
    """The process of the harness on rank 0. A context manager, which ends the process."""

    def __init__(
        self, spec: HarnessSpec, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, silent_seconds: float
    ) -> None:
        self._spec, self._model, self._tokenizer = spec, model, tokenizer
        self._silent_seconds = silent_seconds
        self._stack = ExitStack()
        self._process: HarnessProcess | None = None
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def receive(self) -> _Question | TaskScores | None:
        """The next question, or what the process ended with; None if there is neither within some seconds."""
        try:
            process = self._process = self._process or self._start()
            try:
                line = process.next_line(_SECONDS_BETWEEN_BROADCASTS)
            except queue.Empty:
                if time.monotonic() - self._last_line > self._silent_seconds:
                    raise JobError(
                        f"{FIELD}: lm-evaluation-harness asked nothing for {self._silent_seconds:.0f} s, "
                        "retry.hangTimeout: correct the task, or set limit"
                    ) from None
                return None
            self._last_line = time.monotonic()
            return TaskScores(harness_scores(process.results())) if line is None else _question(json.loads(line))
        except (SpotuneError, OSError, ValueError) as error:  # ValueError: a configuration that cannot be saved
            return TaskScores(problem=str(error))

    def answer(self, value: Any) -> None:
        """Answer the last question."""
        assert self._process is not None
        self._process.write(value)
        self._last_line = time.monotonic()

    def _start(self) -> HarnessProcess:
        folder = self._stack.enter_context(TemporaryDirectory())
        self._model.config.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        return self._stack.enter_context(HarnessProcess(self._spec, {"action": "ask", "model": folder}))


def _question(content: Mapping[str, Any]) -> _Question:
    if "generate" in content:
        asked = content["generate"]
        prompts = list(map(tuple, asked["prompts"]))
        return _Generate(prompts, asked["stop"], asked["maxNewTokens"], asked["options"])
    pairs = content["loglikelihood"]["pairs"]
    return _LogLikelihoods([(tuple(inputs), tuple(target)) for inputs, target in pairs])


@dataclass(frozen=True)
class _Answers:
    """Answers questions by forward passes of all ranks."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    base: GenerationConfig
    batch_size: int
    ranks: RankGroup
    synced_gpus: bool
    heartbeat: Callable[[], None]

    def to(self, question: _Question) -> list[Any]:
        """An answer to each request of the question, the same on every rank."""
        return self._generate(question) if isinstance(question, _Generate) else self._log_likelihoods(question)

    def _log_likelihoods(self, question: _LogLikelihoods) -> list[LogLikelihood]:
        """Pairs with the same inputs, such as answers of one token to a question, share a forward pass if causal."""
        rows: dict[tuple[Tokens, ...], tuple[Tokens, list[Tokens]]] = {}
        for inputs, target in question.pairs:
            key = (inputs, target) if self.model.config.is_encoder_decoder else (inputs,)
            targets = rows.setdefault(key, (inputs, []))[1]
            if target not in targets:
                targets.append(target)

        def run(batch: Sequence[tuple[Tokens, list[Tokens]]]) -> list[list[LogLikelihood]]:
            self.heartbeat()
            return log_likelihoods(self.model, [inputs for inputs, _ in batch], [targets for _, targets in batch])

        results = self._run(run, list(rows.values()), length=lambda row: len(row[0]))
        found = {
            (inputs, target): value
            for (inputs, targets), values in zip(rows.values(), results, strict=True)
            for target, value in zip(targets, values, strict=True)
        }
        return [found[pair] for pair in question.pairs]

    def _generate(self, question: _Generate) -> list[list[int]]:
        def run(prompts: Sequence[Tokens]) -> list[list[int]]:
            # The decoder's first token counts, too.
            further = max(map(len, prompts)) - 1 if self.model.config.is_encoder_decoder else 0
            config = greedy_config(self.base, question.max_new_tokens + further)
            config.update(**question.options)
            return generate_tokens(
                self.model,
                self.tokenizer,
                prompts,
                config,
                stop=question.stop,
                heartbeat=self.heartbeat,
                synced_gpus=self.synced_gpus,
            )

        return self._run(run, question.prompts, length=len)

    def _run(
        self, run: Callable[[Sequence[Row]], Sequence[T]], rows: Sequence[Row], length: Callable[[Row], int]
    ) -> list[T]:
        """The result of each row. Batches have rows of similar length, longest first."""
        ordered = sorted(range(len(rows)), key=lambda index: -length(rows[index]))
        batches = [ordered[start : start + self.batch_size] for start in range(0, len(ordered), self.batch_size)]
        results = run_batches(lambda batch, _: run([rows[index] for index in batch]), batches, self.ranks)
        found = dict(zip(ordered, chain.from_iterable(results), strict=True))
        return [found[index] for index in range(len(rows))]
