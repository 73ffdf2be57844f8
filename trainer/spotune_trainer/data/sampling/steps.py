"""How many samples each step and each epoch of a run have. Pure arithmetic, without NumPy."""

from __future__ import annotations

import math


class EpochSteps:
    """Epochs of `num_samples` in steps of `global_batch_size`. The last step of an epoch may have fewer samples.

    Args:
        num_samples: Samples per epoch.
        global_batch_size: Samples per step over all ranks.

    Raises:
        ValueError: The batch size is not positive.
    """

    def __init__(self, num_samples: int, global_batch_size: int) -> None:
        if global_batch_size < 1:
            raise ValueError(f"the global batch size must be at least 1, not {global_batch_size}")
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size

    @property
    def steps_per_epoch(self) -> int:
        """``ceil(num_samples / global_batch_size)``."""
        return math.ceil(self.num_samples / self.global_batch_size)

    def total_steps(self, epochs: int | None, max_steps: int | None) -> int:
        """Steps of the whole run: ``epochs`` full epochs, limited to ``max_steps``. At least one must be given."""
        limits = [] if epochs is None else [epochs * self.steps_per_epoch]
        limits += [] if max_steps is None else [max_steps]
        return min(limits)

    def epoch_of(self, step: int) -> int:
        """The epoch of a global step; both count from 0."""
        return step // self.steps_per_epoch

    def samples_before(self, step: int) -> int:
        """Number of samples of all steps before a global step, which counts from 0."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * self.num_samples + steps * self.global_batch_size


def held_out_count(num_samples: int, fraction: float) -> int:
    """How many samples are held out for evaluation: ``max(1, round(fraction * num_samples))``.

    Raises:
        ValueError: The fraction is not between 0 and 1, or leaves no samples to train on.
    """
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"the held-out fraction must be between 0 and 1, not {fraction}")
    count = max(1, round(fraction * num_samples))
    if count >= num_samples:
        raise ValueError(f"holding out {fraction} of {num_samples} samples leaves nothing to train on")
    return count
