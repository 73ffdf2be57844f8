"""Computes the size of a checkpoint and the optimal checkpoint interval.

Sources: Young, "A first order approximation to the optimum checkpoint interval" (1974): `sqrt(2 d M)`. Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps" (2006), equation 37. `d` is the time for which a
checkpoint blocks training, and `M` the mean time between failures of the whole job. The interval is the training time
between two checkpoints.
"""

from __future__ import annotations

import math

CHECKPOINT_BYTES_PER_PARAMETER = 12
"""float32 master weights and AdamW's two moments, at every training precision."""
SECONDS_TO_PREEMPTION = 6 * 3600.0
"""Assumed mean time until one spot worker is preempted, before there are observations."""

MINIMUM_INTERVAL_SECONDS = 30.0
MAXIMUM_INTERVAL_SECONDS = 1800.0
_SHORTEST_STALL_SECONDS = 1e-3


def checkpoint_bytes(parameters: int, bytes_per_parameter: float = CHECKPOINT_BYTES_PER_PARAMETER) -> int:
    """Size in bytes of one checkpoint over all workers, for the given number of trained parameters.

    Optimizers other than AdamW have other `bytes_per_parameter`: `spotune.plan.memory.Precision.checkpoint_bytes`.
    """
    return math.ceil(parameters * bytes_per_parameter)


def young_interval_seconds(save_seconds: float, mean_seconds_between_failures: float) -> float:
    """Young's interval: seconds of training between checkpoints. Raises ValueError unless both are positive."""
    _check_positive(save_seconds, mean_seconds_between_failures)
    return math.sqrt(2 * save_seconds * mean_seconds_between_failures)


def daly_interval_seconds(save_seconds: float, mean_seconds_between_failures: float) -> float:
    """Daly's interval: seconds of training between checkpoints. Also valid if saving is not short compared with `M`.

    Raises:
        ValueError: an argument is not positive.
    """
    _check_positive(save_seconds, mean_seconds_between_failures)
    if save_seconds >= 2 * mean_seconds_between_failures:
        return mean_seconds_between_failures
    ratio = save_seconds / (2 * mean_seconds_between_failures)
    young = young_interval_seconds(save_seconds, mean_seconds_between_failures)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def checkpoint_interval_seconds(
    save_seconds: float,
    mean_seconds_between_failures: float,
    *,
    minimum_seconds: float = MINIMUM_INTERVAL_SECONDS,
    maximum_seconds: float = MAXIMUM_INTERVAL_SECONDS,
) -> float:
    """Daly's interval, clamped to limits.

    The minimum protects logs and storage. The maximum bounds the loss to half an hour if the failure rate is estimated
    wrongly. The minimum is at least `save_seconds`, so that training gets at least half of the time. Raises ValueError
    as `daly_interval_seconds` does.
    """
    interval = daly_interval_seconds(save_seconds, mean_seconds_between_failures)
    return max(minimum_seconds, save_seconds, min(interval, maximum_seconds))


def background_interval_seconds(
    stall_seconds: float, commit_seconds: float, mean_seconds_between_failures: float
) -> float:
    """The interval for `checkpoint.every: auto`, from a measured commit: Daly's interval, but at least one commit.

    Args:
        stall_seconds: time for which the commit blocked training.
        commit_seconds: time until the commit was durable, mostly in the background.
        mean_seconds_between_failures: mean time between failures of the whole job.
    """
    return checkpoint_interval_seconds(
        max(stall_seconds, _SHORTEST_STALL_SECONDS),
        mean_seconds_between_failures,
        minimum_seconds=max(MINIMUM_INTERVAL_SECONDS, commit_seconds),
    )


def seconds_to_preemption(worker_seconds: float, losses: int) -> float:
    """Mean time until one worker is preempted, estimated from observations and a prior.

    It is the inverse posterior mean of the rate of a Poisson process with a conjugate gamma prior, which counts as one
    loss in `SECONDS_TO_PREEMPTION`.

    Args:
        worker_seconds: total time for which workers have run, summed over workers.
        losses: number of workers lost in that time.
    """
    return (SECONDS_TO_PREEMPTION + worker_seconds) / (1 + losses)


def mean_seconds_between_failures(mean_seconds_to_preemption: float, world_size: int) -> float:
    """Mean time between failures of a job that stops if any worker does.

    Times to preemption are assumed to be independent and exponential, so the rates of `world_size` workers add up.
    """
    return mean_seconds_to_preemption / world_size


def expected_steps_lost(interval_seconds: float, step_seconds: float) -> float:
    """Mean number of steps lost per failure, if failures are uniform within the interval."""
    return interval_seconds / 2 / step_seconds


def lost_fraction(
    interval_seconds: float, save_seconds: float, mean_seconds_between_failures: float, restart_seconds: float = 0.0
) -> float:
    """Fraction of the time spent on saving, repeated work and restarts, to first order, at most 1.

    `save / (interval + save) + (interval / 2 + restart) / M` (Daly 2006, section 2).
    """
    saving = save_seconds / (interval_seconds + save_seconds)
    repeating = (interval_seconds / 2 + restart_seconds) / mean_seconds_between_failures
    return min(1.0, saving + repeating)


def _check_positive(save_seconds: float, mean_seconds_between_failures: float) -> None:
    if save_seconds <= 0 or mean_seconds_between_failures <= 0:
        raise ValueError(
            f"time to save ({save_seconds} s) and between failures ({mean_seconds_between_failures} s) must be positive"
        )
