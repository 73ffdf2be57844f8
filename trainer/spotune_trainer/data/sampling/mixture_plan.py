"""How many samples of each source of a mixture a run trains on. Pure arithmetic, without NumPy.

The steps are divided into stages, in each of which the same sources are used (curriculum). Within a stage the positions
of the sample stream are distributed over its sources by `interleave`. Shares are shares of the samples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from fractions import Fraction

from spotune.job import FinetuneJob
from spotune_trainer.data.sampling.interleave import Interleave
from spotune_trainer.data.sampling.steps import EpochSteps

_TEMPERATURE_DIGITS = 6  # significant digits of a weight that a temperature gives


@dataclass(frozen=True)
class MixedSource:
    """A source of a mixture.

    Attributes:
        name: for people.
        num_samples: samples to train on.
        weight: its share, relative to the other sources.
        from_step: optimizer steps before it is used.
        until_step: optimizer steps after which it is not used any more; 0: it is used to the end.
        max_epochs: passes over it that are allowed; 0: any number.
    """

    name: str
    num_samples: int
    weight: Fraction
    from_step: int = 0
    until_step: int = 0
    max_epochs: int = 0

    def is_used_at(self, step: int) -> bool:
        """Whether a step, which counts from 0, takes samples from this source."""
        return self.from_step <= step and (self.until_step == 0 or step < self.until_step)


@dataclass(frozen=True)
class Stage:
    """Consecutive steps that take their samples from the same sources.

    Attributes:
        position: of its first sample in the stream of all samples.
        sources: indices of its sources in the mixture, ascending.
        drawn: how many samples each source of the mixture has given before.
        interleave: of its sources.
    """

    position: int
    sources: tuple[int, ...]
    drawn: tuple[int, ...]
    interleave: Interleave

    def drawn_at(self, position: int) -> tuple[int, ...]:
        """How many samples each source of the mixture has given before a position of the stream in this stage."""
        drawn = list(self.drawn)
        for source, count in zip(self.sources, self.interleave.counts(position - self.position), strict=True):
            drawn[source] += count
        return tuple(drawn)


class MixturePlan(EpochSteps):
    """The stages of a run on a mixture. An epoch has as many samples as all sources together.

    Args:
        sources: At least one; each step has at least one of them.
        global_batch_size: Samples per step over all ranks.

    Raises:
        ValueError: The batch size is not positive, or a step has no source.
    """

    def __init__(self, sources: Sequence[MixedSource], global_batch_size: int) -> None:
        super().__init__(sum(source.num_samples for source in sources), global_batch_size)
        self.sources = tuple(sources)
        self._first_steps = sorted({0, *(step for source in sources for step in (source.from_step, source.until_step))})
        self._stages: list[Stage] = []
        for step in self._first_steps:
            self._stages.append(self._stage(step))

    def stage_of(self, step: int) -> Stage:
        """The stage of a global step, which counts from 0."""
        if step < 0:
            raise ValueError(f"steps count from 0, not {step}")
        return self._stages[bisect_right(self._first_steps, step) - 1]

    def samples_by_source(self, step: int) -> dict[str, int]:
        """Number of samples of each source before a global step, which counts from 0."""
        drawn = self.stage_of(step).drawn_at(self.samples_before(step))
        return {source.name: count for source, count in zip(self.sources, drawn, strict=True)}

    def check_repeats(self, total_steps: int) -> None:
        """Check that a run of `total_steps` repeats no source more often than it may.

        Raises:
            ValueError: The run needs more passes over a source than its `max_epochs`; the message names it.
        """
        needed = self.samples_by_source(total_steps)
        for source in self.sources:
            if source.max_epochs and needed[source.name] > source.max_epochs * source.num_samples:
                passes = needed[source.name] / source.num_samples
                raise ValueError(
                    f"{source.name}: the run of {total_steps:,} steps needs {needed[source.name]:,} samples of this "
                    f"source, {passes:.2f} passes over its {source.num_samples:,}, and its maxEpochs is "
                    f"{source.max_epochs}: lower its weight, shorten the run, or raise maxEpochs"
                )

    def describe(self, total_steps: int) -> Iterator[str]:
        """A line for each source: its share of a run of `total_steps`, its samples, and how many passes these are."""
        counts, all_samples = self.samples_by_source(total_steps), self.samples_before(total_steps)
        for source in self.sources:
            count, until = counts[source.name], source.until_step or total_steps
            limited = source.from_step > 0 or until < total_steps
            steps = f" in steps {source.from_step + 1:,} to {until:,}" if limited else ""
            yield (
                f"{source.name}: {count / all_samples:.2%} of the samples of the run{steps}: {count:,}, "
                f"{count / source.num_samples:.2f} passes over {source.num_samples:,}"
            )

    def _stage(self, first_step: int) -> Stage:
        """The stage that begins with a step; the stages before it exist."""
        position = self.samples_before(first_step)
        used = tuple(index for index, source in enumerate(self.sources) if source.is_used_at(first_step))
        if not used:
            raise ValueError(f"the mixture has no source for the steps after step {first_step}")
        drawn = self._stages[-1].drawn_at(position) if self._stages else (0,) * len(self.sources)
        return Stage(position, used, drawn, Interleave([self.sources[index].weight for index in used]))


def plan_mixture(job: FinetuneJob, sizes: Sequence[int]) -> MixturePlan:
    """The plan of a job's mixture.

    Args:
        job: its `dataset.mixture` has the sources.
        sizes: samples of each source to train on, without held-out ones.

    Raises:
        ValueError: the run needs more passes over a source than its `maxEpochs`.
    """
    dataset, training = job.spec.dataset, job.spec.training
    given = [exact_weight(source.weight) for source in dataset.mixture if source.weight is not None]
    weights = given or temperature_weights(sizes, dataset.mixture_temperature or 1.0)
    sources = [
        MixedSource(source.name, size, weight, source.from_step, source.until_step, source.max_epochs)
        for source, size, weight in zip(dataset.mixture, sizes, weights, strict=True)
    ]
    plan = MixturePlan(sources, training.global_batch_size)
    plan.check_repeats(plan.total_steps(training.epochs, training.max_steps))
    return plan


def exact_weight(weight: float) -> Fraction:
    """A weight as it is written: 0.1 is one tenth, not the nearest binary fraction."""
    return Fraction(repr(weight))


def temperature_weights(sizes: Sequence[int], temperature: float) -> list[Fraction]:
    """Weights proportional to ``size ** (1 / temperature)``, of six significant digits; the sizes themselves for 1.

    Temperature-scaled mixing of Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer" (JMLR 21, 2020), section 3.5.2. Decimal arithmetic rounds alike on every machine.
    """
    if temperature == 1:
        return [Fraction(size) for size in sizes]
    with localcontext(Context(prec=28)):
        powers = [(Decimal(size).ln() / Decimal(repr(temperature))).exp() for size in sizes]
    return [Fraction(Context(prec=_TEMPERATURE_DIGITS).plus(power)) for power in powers]
