"""Profiles one forward pass of a run with DeepSpeed's flops profiler; the result is in the job's `profile/` folder.

The pass is an extra one, over the first micro-batch of the step, in evaluation mode: no gradients, no dropout. It runs
uncompiled, because the profiler counts calls of PyTorch's functions, which compiled layers do not make. It changes
neither weights nor optimizer nor training randomness: dropout is seeded again for each micro-batch. All ranks take
part, since ZeRO-3 gathers weights from all of them; rank 0 counts.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from typing import Any

import torch
from deepspeed.profiling.flops_profiler import FlopsProfiler
from torch import distributed, nn
from torch.nn import functional

from spotune.errors import JobError
from spotune_trainer import files
from spotune_trainer.data.batches import Batch
from spotune_trainer.evaluation.ranks import evaluation_mode
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.models.loss import summed_loss
from spotune_trainer.models.quantization.nf4 import Linear4bit

logger = logging.getLogger("spotune.worker")

_TOP_MODULES = 3
_UNCOUNTABLE = (AssertionError, AttributeError, IndexError, NotImplementedError, TypeError)
"""What the profiler raises if a function is called in a way that it does not support."""


class FlopsProfile:
    """The profile of a run; made once, before step `step` or, if a run resumes after it, before its next step.

    Args:
        directory: of the job.
        step: `execution.flopsProfile`; 0: no profile.
        rank: of this process.
        control: gloo group of all ranks.
    """

    def __init__(self, directory: JobDirectory, step: int, rank: int, control: Any) -> None:
        self._directory = directory
        self._step = step
        self._rank = rank
        is_pending = [step > 0 and not directory.flops_profile.exists()]
        if step > 0:  # a network volume may show ranks different states
            distributed.broadcast_object_list(is_pending, src=0, group=control)
        self._is_pending = is_pending[0]

    def is_due(self, step: int) -> bool:
        """Whether to make the profile before the step of this number."""
        return self._is_pending and step >= self._step

    def make(self, engine: Any, batch: Batch, step: int, forward: Callable[[Any, Batch], object] = summed_loss) -> None:
        """Make the profile. All ranks call it together, each with a batch of its own on the engine's device.

        Args:
            engine: of the rank.
            batch: its rows.
            step: that follows.
            forward: runs the model on a batch; see `Objective.forward`.

        Raises:
            JobError: the profiler cannot count this model.
        """
        batch = replace(batch, cu_seq_lens=None)  # the profiler counts attention with a mask only
        self._is_pending = False
        model = engine.module
        with evaluation_mode(model), torch.compiler.set_stance("force_eager"):
            forward(model, batch)  # warm-up, not timed
            if self._rank != 0:
                forward(model, batch)
                return
            with _profiling(engine) as profiler:
                try:
                    forward(model, batch)
                except _UNCOUNTABLE as error:
                    raise JobError(
                        "execution.flopsProfile: DeepSpeed's flops profiler cannot count this model "
                        f"({type(error).__name__}: {error}): leave it out"
                    ) from error
                self._write(profiler, batch, step)

    def _write(self, profiler: Any, batch: Batch, step: int) -> None:
        """Write both files, the JSON last: its existence marks the profile as made."""
        with redirect_stdout(io.StringIO()) as printed:
            profiler.print_model_profile(profile_step=step, top_modules=_TOP_MODULES)
        rows, width = batch.input_ids.shape
        counts = {
            "step": step,
            "rows": rows,
            "sequence": width,
            "parameters": profiler.get_total_params(),
            "forwardFlops": profiler.get_total_flops(),
            "forwardMacs": profiler.get_total_macs(),
            "forwardSeconds": round(profiler.get_total_duration(), 6),
        }
        try:
            self._directory.profile.mkdir(exist_ok=True)
            files.write_text(self._directory.profile / "flops.txt", printed.getvalue())
            files.write_json(self._directory.flops_profile, counts)
        except OSError as error:
            logger.warning("the profile of step %d cannot be written: %s", step, error)
        else:
            logger.info("profile of step %d written to %s", step, self._directory.profile)


@contextmanager
def _profiling(engine: Any) -> Iterator[Any]:
    """Run the profiler, with right counts at ZeRO-3, too; all its patches are removed afterwards.

    At ZeRO-3 parameters are partitioned, and DeepSpeed's linear function calls PyTorch's, which would count twice.
    """
    profiler = FlopsProfiler(engine.module, engine)
    modules = list(engine.module.modules())
    methods = set(vars(torch.Tensor))
    as_written = [module for module in modules if "extra_repr" not in vars(module)]
    linear, functional.linear = functional.linear, torch._C._nn.linear
    profiler.start_profile()
    for module in modules:
        module.__params__ = _parameters(module)
    try:
        yield profiler
    finally:
        profiler.end_profile()
        functional.linear = linear
        for name in vars(torch.Tensor).keys() - methods:  # inherited before
            delattr(torch.Tensor, name)
        for module in as_written:
            vars(module).pop("extra_repr", None)


def _parameters(module: nn.Module) -> int:
    """Number of parameters of a module, including partitions on other ranks and weights in 4 bits."""
    floats = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())
    return floats + sum(
        layer.in_features * layer.out_features for layer in module.modules() if isinstance(layer, Linear4bit)
    )
