"""The sample schedule of a mixture: which samples of which source each step trains on, as a pure function.

Every step has the number of samples that it would have with one dataset of as many samples as all sources have. The
steps are divided into stages, in each of which the same sources are used (curriculum). Within a stage the positions of
the sample stream are distributed over its sources by `interleave`. The draws of a source are numbered over all stages:
draw ``d`` of a source of ``n`` samples is sample ``d mod n`` of its epoch ``d // n``, in the order of its own
`SampleSchedule`. So a source is used up before any of its samples comes again.

Ids of samples are unique over the mixture: to the id within its source is added the number of samples of all sources
before it, held-out ones included.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from spotune.job import FinetuneJob
from spotune_trainer.data.interleave import Interleave, exact_weight, temperature_weights
from spotune_trainer.data.schedule import SampleIds, SampleSchedule, Schedule


@dataclass(frozen=True)
class MixedSource:
    """A source of a mixture.

    Attributes:
        name: for people.
        schedule: the order of its samples in each of its epochs.
        weight: its share, relative to the other sources.
        first_id: added to the ids of its samples.
        from_step: optimizer steps before it is used.
        until_step: optimizer steps after which it is not used any more; 0: it is used to the end.
        max_epochs: passes over it that are allowed; 0: any number.
    """

    name: str
    schedule: SampleSchedule
    weight: Fraction
    first_id: int
    from_step: int = 0
    until_step: int = 0
    max_epochs: int = 0

    def is_used_at(self, step: int) -> bool:
        """Whether a step, which counts from 0, takes samples from this source."""
        return self.from_step <= step and (self.until_step == 0 or step < self.until_step)


@dataclass(frozen=True)
class _Stage:
    """Consecutive steps that take their samples from the same sources.

    Attributes:
        position: of its first sample in the stream of all samples.
        sources: indices of its sources.
        drawn: how many samples each source of the mixture has given before.
        interleave: of its sources.
    """

    position: int
    sources: npt.NDArray[np.int64]
    drawn: npt.NDArray[np.int64]
    interleave: Interleave

    def drawn_at(self, position: int) -> npt.NDArray[np.int64]:
        """How many samples each source of the mixture has given before a position of the stream in this stage."""
        drawn = self.drawn.copy()
        drawn[self.sources] += self.interleave.counts(position - self.position)
        return drawn


class MixtureSchedule(Schedule):
    """The samples of every step of a run on a mixture. See the module for the formula.

    Shares are shares of the samples. An epoch has as many samples as all sources together.

    Args:
        sources: At least one; each step has at least one of them.
        global_batch_size: Samples per step over all ranks.

    Raises:
        ValueError: The batch size is not positive, or a step has no source.
    """

    def __init__(self, sources: Sequence[MixedSource], global_batch_size: int) -> None:
        schedules = [source.schedule for source in sources]
        super().__init__(
            sum(schedule.num_samples for schedule in schedules),
            global_batch_size,
            sum(schedule.shuffle_block_size for schedule in schedules),
        )
        self.sources = tuple(sources)
        self._first_steps = sorted({0, *(step for source in sources for step in (source.from_step, source.until_step))})
        self._stages: list[_Stage] = []
        for step in self._first_steps:
            self._stages.append(self._stage(step))

    def sample_ids(self, step: int) -> SampleIds:
        """Sample ids of a global step (from 0), in order: ``[global_batch_size]``, fewer at the end of an epoch."""
        stage = self._stage_of(step)
        start, stop = (self.samples_before(each) - stage.position for each in (step, step + 1))
        active, draws = stage.interleave.draws(start, stop)
        sources = stage.sources[active]
        draws = draws + stage.drawn[sources]
        ids = np.empty(stop - start, dtype=np.int64)
        for index in np.unique(sources):
            mine = sources == index
            ids[mine] = _ids_of_draws(self.sources[index], draws[mine])
        return ids

    def samples_by_source(self, step: int) -> dict[str, int]:
        """Number of samples of each source before a global step, which counts from 0."""
        drawn = self._stage_of(step).drawn_at(self.samples_before(step))
        return {source.name: int(count) for source, count in zip(self.sources, drawn, strict=True)}

    def shares(self, step: int) -> dict[str, Fraction]:
        """Share of the samples of a global step (from 0) by source; without the sources that it does not use."""
        stage = self._stage_of(step)
        return {
            self.sources[index].name: share
            for index, share in zip(stage.sources.tolist(), stage.interleave.shares, strict=True)
        }

    def check_repeats(self, total_steps: int) -> None:
        """Check that no source is repeated more often than it may be.

        Args:
            total_steps: Steps of the whole run.

        Raises:
            ValueError: The run needs more passes over a source than its `max_epochs`; the message names it.
        """
        needed = self.samples_by_source(total_steps)
        for source in self.sources:
            available = source.schedule.num_samples
            if source.max_epochs and needed[source.name] > source.max_epochs * available:
                raise ValueError(
                    f"the run of {total_steps:,} steps needs {needed[source.name]:,} samples of the source "
                    f"{source.name}, {needed[source.name] / available:.2f} passes over its {available:,} samples, and "
                    f"maxEpochs allows {source.max_epochs}: lower its weight, shorten the run, or raise maxEpochs"
                )

    def _stage_of(self, step: int) -> _Stage:
        if step < 0:
            raise ValueError(f"steps count from 0, not {step}")
        return self._stages[bisect_right(self._first_steps, step) - 1]

    def _stage(self, first_step: int) -> _Stage:
        """The stage that begins with a step; the stages before it exist."""
        position = self.samples_before(first_step)
        used = [index for index, source in enumerate(self.sources) if source.is_used_at(first_step)]
        if not used:
            raise ValueError(f"the mixture has no source for the steps after step {first_step}")
        drawn = self._stages[-1].drawn_at(position) if self._stages else np.zeros(len(self.sources), dtype=np.int64)
        interleave = Interleave([self.sources[index].weight for index in used])
        return _Stage(position, np.asarray(used, dtype=np.int64), drawn, interleave)


def build_mixture(job: FinetuneJob, schedules: Sequence[SampleSchedule], first_ids: Sequence[int]) -> MixtureSchedule:
    """The schedule of a job's mixture.

    Args:
        job: its `dataset.mixture` has the sources.
        schedules: of the sources.
        first_ids: added to the ids of each source's samples.

    Raises:
        ValueError: the run needs more passes over a source than its `maxEpochs`.
    """
    dataset, training = job.spec.dataset, job.spec.training
    given = [exact_weight(source.weight) for source in dataset.mixture if source.weight is not None]
    sizes = [schedule.num_samples for schedule in schedules]
    weights = given or temperature_weights(sizes, dataset.mixture_temperature or 1)
    sources = [
        MixedSource(source.name, schedule, weight, first_id, source.from_step, source.until_step, source.max_epochs)
        for source, schedule, weight, first_id in zip(dataset.mixture, schedules, weights, first_ids, strict=True)
    ]
    mixture = MixtureSchedule(sources, training.global_batch_size)
    mixture.check_repeats(mixture.total_steps(training.epochs, training.max_steps))
    return mixture


def describe_mixture(mixture: MixtureSchedule, total_steps: int) -> Iterator[str]:
    """A line for each source: its share of the samples, how many the whole run takes, and how many passes these are."""
    counts = mixture.samples_by_source(total_steps)
    for source in mixture.sources:
        count, available = counts[source.name], source.schedule.num_samples
        share = count / max(mixture.samples_before(total_steps), 1)
        until = source.until_step or total_steps
        steps = (
            f" in steps {source.from_step + 1:,} to {until:,}" if (source.from_step, until) != (0, total_steps) else ""
        )
        yield (
            f"source {source.name}: {share:.2%} of the samples{steps}: {count:,}, {count / available:.2f} passes over "
            f"{available:,}"
        )


def _ids_of_draws(source: MixedSource, draws: npt.NDArray[np.int64]) -> SampleIds:
    """Ids over the mixture of some draws of one source."""
    epochs, positions = np.divmod(draws, source.schedule.num_samples)
    ids = np.empty(len(draws), dtype=np.int64)
    for epoch in np.unique(epochs):
        mine = epochs == epoch
        ids[mine] = source.schedule.epoch_order(int(epoch))[positions[mine]]
    return ids + source.first_id
