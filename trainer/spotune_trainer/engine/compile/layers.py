"""Layers compiled by torch.compile, and what that took kept on the job's volume for the next start.

Every repeated layer of a model is compiled as a function of its own, once for all of them: layers are of one code, and
hooks around them (DeepSpeed gathers weights in them at stage 3) stay outside. Shapes are static. A kernel is then a
function of its shapes alone, and on GPUs of what the compiler measured to be fastest where it has a choice, which it
has not for sums with `execution.deterministic`: a run that is resumed computes what it would have computed. Batches are
padded to few widths (`WIDTH_MULTIPLE`), or each new one would be compiled. Evaluation, whose batches have many shapes,
runs without.
"""

from __future__ import annotations

import logging
import re
import shutil
import sysconfig
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spotune_trainer import files
from spotune_trainer.engine.compile.addmm_fusion import SumsOfProducts
from spotune_trainer.engine.compile.gradient_accumulation_fusion import add_up_in_products
from spotune_trainer.engine.compile.residual_saving import KeepResidualSums

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("spotune.worker")

WIDTH_MULTIPLE = 128
"""Batches are padded to a multiple of so many tokens; matrix units like it, too."""
_OPTIONS: dict[str, Any] = {
    "joint_custom_pre_pass": KeepResidualSums(),
    "post_grad_custom_pre_pass": SumsOfProducts(),
}
"""Of torch.compile, which takes layers to be of one code only where these are the very same object."""
_MOST_SHAPES = 256
"""Shapes of a layer's input after which torch.compile gives up and runs it as it is."""


def why_not(*, on_gpus: bool) -> str | None:
    """What torch.compile lacks on this machine, for people; None where it has all.

    For GPUs Triton builds its launchers in C, for processors kernels are C++.
    """
    compilers = ("cc", "gcc", "clang") if on_gpus else ("g++", "clang++")
    if not any(shutil.which(name) for name in compilers):
        return f"a compiler ({compilers[-2]})"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers (python3-dev)"
    return None


def compile_layers(model: PreTrainedModel, *, recompute: bool = False) -> list[nn.Module]:
    """Compile the layers of which the model is a stack, and the norms around it; returns the layers.

    With `recompute` the backward pass runs a layer again instead of keeping what it needs of it. That is done around
    what is compiled: a compiler that has it within takes random numbers from generators of its own, which a seed does
    not reach, and a run with dropout would go on with other ones after a restart. The model must not do it as well.
    """
    dynamo: Any = torch._dynamo
    dynamo.config.recompile_limit = _MOST_SHAPES
    dynamo.config.accumulated_recompile_limit = max(_MOST_SHAPES, dynamo.config.accumulated_recompile_limit)
    layers = repeated_layers(model)
    add_up_in_products(layers)
    within = {module for layer in layers for module in layer.modules()}
    norms = [m for m in model.modules() if m not in within and "norm" in type(m).__name__.lower()]
    for module in [*layers, *norms]:
        module.forward = _while_training(module, recompute=recompute and module in layers)
    return layers


def repeated_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks of a transformer, of encoder and decoder: what `transformers` never splits over devices."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _while_training(module: nn.Module, *, recompute: bool) -> Callable[..., Any]:
    eager = module.forward
    compiled = torch.compile(eager, dynamic=False, options=_OPTIONS)
    trained = partial(checkpoint, compiled, use_reentrant=False) if recompute else compiled

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (trained if module.training else eager)(*args, **kwargs)

    return forward


class CompileCache:
    """What torch.compile has made, as one file for each kind of device and version of PyTorch.

    Args:
        folder: of the job's directory; shared by all ranks and generations.
        writes: whether this rank writes it.
    """

    def __init__(self, folder: Path, *, writes: bool) -> None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        self.path = folder / (re.sub(r"[^a-zA-Z0-9.]+", "-", f"{device} torch {torch.__version__}") + ".bin")
        self._writes = writes
        self._kept: set[str] = set()
        self._writing: threading.Thread | None = None

    def load(self) -> None:
        """Take in what an earlier start has compiled; without it, or where it is damaged, all is compiled again.

        PyTorch checks the file, and says in the log what is wrong with it.
        """
        with suppress(OSError):
            self._kept = _keys(torch.compiler.load_cache_artifacts(self.path.read_bytes()))

    def keep(self) -> None:
        """Write what has been compiled in this process, if anything is new; in a thread."""
        if not self._writes or (self._writing is not None and self._writing.is_alive()):
            return
        self._writing = threading.Thread(target=self._write, name="compile-cache", daemon=True)
        self._writing.start()

    def wait(self) -> None:
        """Wait until what `keep` began is written."""
        if self._writing is not None:
            self._writing.join()

    def _write(self) -> None:
        saved = torch.compiler.save_cache_artifacts()
        if saved is None or _keys(saved[1]) <= self._kept:
            return
        try:
            self.path.parent.mkdir(exist_ok=True)
            files.write_bytes(self.path, saved[0])
        except OSError as error:
            logger.warning("%s cannot be written: %s", self.path.name, error)
            return
        self._kept = _keys(saved[1])


def _keys(info: Any) -> set[str]:
    """Names of the artifacts that torch.compile says it has saved or loaded."""
    artifacts = info.artifacts if info is not None else {}
    return {f"{kind}/{key}" for kind, keys in artifacts.items() for key in keys}
