"""How large a checkpoint is and how often to write one.

Young, "A first order approximation to the optimum checkpoint interval" (1974): `sqrt(2 d M)`. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps" (2006), equation 37. `d` is the time that a checkpoint
costs training, `M` the mean time between failures of the whole job; the interval is work between two checkpoints.
"""

from __future__ import annotations

import math

CHECKPOINT_BYTES_PER_PARAMETER = 12
"""float32 master weights and Adam's two moments, whatever the precision of training."""
SECONDS_TO_PREEMPTION = 6 * 3600.0
"""Assumed mean time until one spot worker is taken away, where nothing else is known."""

MINIMUM_INTERVAL_SECONDS = 30.0
MAXIMUM_INTERVAL_SECONDS = 1800.0
_SHORTEST_STALL_SECONDS = 1e-3


def checkpoint_bytes(parameters: int) -> int:
    """Bytes of one checkpoint of `parameters` trainable parameters, over all workers."""
    return parameters * CHECKPOINT_BYTES_PER_PARAMETER


def young_interval_seconds(save_seconds: float, mean_seconds_between_failures: float) -> float:
    """Young's interval, in seconds of work between checkpoints. Raises ValueError unless both are positive."""
    _check_positive(save_seconds, mean_seconds_between_failures)
    return math.sqrt(2 * save_seconds * mean_seconds_between_failures)


def daly_interval_seconds(save_seconds: float, mean_seconds_between_failures: float) -> float:
    """Daly's interval, in seconds of work between checkpoints; it holds where saving is not short against `M`, too.

    Raises:
        ValueError: one of the two is not positive.
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
    """Daly's interval within limits.

    Not so often that logs and storage suffer, and not so rarely that a wrong failure rate costs more than half an hour.
    The lower limit rises to `save_seconds`, so that training has at least half of the time. Raises ValueError as
    `daly_interval_seconds` does.
    """
    interval = daly_interval_seconds(save_seconds, mean_seconds_between_failures)
    return max(minimum_seconds, save_seconds, min(interval, maximum_seconds))


def background_interval_seconds(
    stall_seconds: float, commit_seconds: float, mean_seconds_between_failures: float
) -> float:
    """`checkpoint.every: auto` once a commit has shown what it costs: Daly's interval, and not shorter than a commit.

    Args:
        stall_seconds: that training waited for the commit.
        commit_seconds: until it was durable, most of them beside training.
        mean_seconds_between_failures: of the whole job.
    """
    return checkpoint_interval_seconds(
        max(stall_seconds, _SHORTEST_STALL_SECONDS),
        mean_seconds_between_failures,
        minimum_seconds=max(MINIMUM_INTERVAL_SECONDS, commit_seconds),
    )


def seconds_to_preemption(worker_seconds: float, losses: int) -> float:
    """Mean time until one worker is taken away, from what was seen and, while that is little, what is assumed.

    The posterior mean of the rate of a Poisson process whose prior is one loss in `SECONDS_TO_PREEMPTION` (a gamma
    distribution, its conjugate).

    Args:
        worker_seconds: that workers were held for, summed.
        losses: workers that were lost in that time.
    """
    return (SECONDS_TO_PREEMPTION + worker_seconds) / (1 + losses)


def mean_seconds_between_failures(mean_seconds_to_preemption: float, world_size: int) -> float:
    """Of a job that stops when any of `world_size` workers does: independent exponential times, so the rates add up."""
    return mean_seconds_to_preemption / world_size


def expected_steps_lost(interval_seconds: float, step_seconds: float) -> float:
    """Steps that one failure throws away on average: failures fall evenly within the interval."""
    return interval_seconds / 2 / step_seconds


def lost_fraction(
    interval_seconds: float, save_seconds: float, mean_seconds_between_failures: float, restart_seconds: float = 0.0
) -> float:
    """Share of the time that saving, repeated work and restarts take, to first order, at most 1.

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
