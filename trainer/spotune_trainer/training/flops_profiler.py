"""One forward pass as DeepSpeed's flops profiler sees it, once in a run, in `profile/` of the job's directory.

It is a pass beside the training: over the micro-batch that the step begins with, but as in an evaluation, without
gradients and dropout. Layers and loss run as they are written, not as torch.compile makes them: the profiler counts
calls of PyTorch's functions, and a compiled layer makes none. Weights, optimizer and randomness stay as they are; the
seed of dropout is set anew for each micro-batch that is trained on. All ranks take part, since ZeRO-3 gathers weights
from all of them, and rank 0 counts.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
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
from spotune_trainer.evaluation.evaluate import evaluating
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.models.loss import summed_loss
from spotune_trainer.models.nf4 import Linear4bit

logger = logging.getLogger("spotune.worker")

_TOP_MODULES = 3
_UNCOUNTABLE = (AssertionError, AttributeError, IndexError, NotImplementedError, TypeError)
"""What the profiler raises where a function is called in a way that it does not know."""


class FlopsProfile:
    """The profile of a run; made before the first step from `step` on for which there is none.

    Args:
        directory: of the job.
        step: `execution.flopsProfile`; 0: none is wanted.
        rank: of this process.
        control: group of all ranks, which begin together.
    """

    def __init__(self, directory: JobDirectory, step: int, rank: int, control: Any) -> None:
        self._directory = directory
        self._step = step
        self._rank = rank
        is_wanted = [step > 0 and not directory.flops_profile.exists()]
        if step > 0:  # ranks may not see the same of a volume
            distributed.broadcast_object_list(is_wanted, src=0, group=control)
        self._is_wanted = is_wanted[0]

    def is_due(self, step: int) -> bool:
        """Whether it is to be made before the step of this number."""
        return self._is_wanted and step >= self._step

    def make(self, engine: Any, batch: Batch, step: int) -> None:
        """Make it, on all ranks together, each with a batch of its own on the engine's device.

        Raises:
            JobError: the profiler cannot count this model.
        """
        batch = replace(batch, document_starts=None)  # attention by a mask is counted, the kernel without one is not
        self._is_wanted = False
        model = engine.module
        with evaluating(model), torch.compiler.set_stance("force_eager"):
            summed_loss(model, batch)  # what is done at the first call alone is not to be timed
            if self._rank != 0:
                summed_loss(model, batch)
                return
            with _profiling(engine) as profiler:
                try:
                    summed_loss(model, batch)
                except _UNCOUNTABLE as error:
                    raise JobError(
                        "execution.flopsProfile: DeepSpeed's flops profiler cannot count this model "
                        f"({type(error).__name__}: {error}): leave it out"
                    ) from error
                self._write(profiler, batch, step)

    def _write(self, profiler: Any, batch: Batch, step: int) -> None:
        """Both files, that for programs last: it is what says that there is a profile."""
        with redirect_stdout(io.StringIO()) as printed:
            profiler.print_model_profile(profile_step=step, top_modules=_TOP_MODULES)
        rows, width = batch.input_ids.shape
        figures = {
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
            files.write_json(self._directory.flops_profile, figures)
        except OSError as error:
            logger.warning("the profile of step %d cannot be written: %s", step, error)
        else:
            logger.info("step %d is profiled: %s", step, self._directory.profile)


@contextmanager
def _profiling(engine: Any) -> Iterator[Any]:
    """The profiler at work, right at ZeRO-3 too; it leaves nothing behind.

    There parameters are cut up, and DeepSpeed's own linear function calls another one that is counted once more.
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
    """How many parameters a module has, those of other ranks and those in 4 bits too."""
    floats = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())
    return floats + sum(
        layer.in_features * layer.out_features for layer in module.modules() if isinstance(layer, Linear4bit)
    )
