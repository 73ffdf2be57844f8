"""Load a model and its LoRA adapters from folders. Weights are read from safetensors only: other files can run code."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.utils import logging

from spotune.errors import JobError
from spotune_serve.engine.adapters.config import ADAPTER_CONFIG, base_of, read_adapter_config
from spotune_serve.engine.model import LoadedModel, default_architecture, task_of, unsupported_architecture
from spotune_serve.engine.weights.block import move_to

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

_AUTO_MODELS: Mapping[str, Any] = {"seq2seq": AutoModelForSeq2SeqLM, "causal": AutoModelForCausalLM}
_MODEL_CONFIG = "config.json"


def load_model(directory: Path, device: str = "cpu") -> PreTrainedModel:
    """The model of an export directory or of any transformers folder, in the saved dtype, in eval mode.

    On processors the weights stay in the page cache: transformers maps the files into memory and copies nothing. So
    the replicas of one node share one copy, and the files must not be changed while the model is served. Weights that
    the folder stores in another form than the model has them, such as those of experts, are copied. To a GPU, weights
    are copied through page-locked buffers.

    Args:
        directory: has a config.json and safetensors.
        device: where to load it.

    Raises:
        JobError: the folder has no model that can be served.
    """
    if not (directory / _MODEL_CONFIG).is_file():
        raise _missing_config(directory)
    fix = "Export the model again, or copy the complete folder."
    with _load_errors(directory, "model", fix):
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True)
    architecture = (config.architectures or [default_architecture(config)])[0]
    task = task_of(architecture)
    if task is None:
        raise JobError(f"{directory}: {unsupported_architecture(architecture)}")
    if not any(directory.glob("*.safetensors")):
        raise JobError(
            f"{directory} has no *.safetensors file. Other weight files can run code and are not read: load the model "
            "with transformers and save it again with save_pretrained."
        )
    with _load_errors(directory, "model", fix):
        model, report = _AUTO_MODELS[task].from_pretrained(
            str(directory),
            config=config,
            dtype="auto",
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise JobError(f"{directory} has no weights for {missing[0]!r} ({len(missing)} missing in all). {fix}")
    loaded: PreTrainedModel = model
    module: torch.nn.Module = loaded
    module.train(False)
    if torch.device(device).type != "cpu":
        move_to(module, torch.device(device))
    return loaded


def load_adapters(model: PreTrainedModel, adapters: Mapping[str, Path]) -> LoadedModel:
    """The model with LoRA adapters, ready for the engine.

    Args:
        model: as `load_model` returns it; adapters are added in place.
        adapters: name in requests -> folder that peft saved.

    Raises:
        JobError: an adapter cannot be loaded or is for another model, or the engine does not support the model.
    """
    names = {name: f"served_{number}" for number, name in enumerate(adapters)}  # module names cannot contain dots
    peft: PeftModel | None = None
    for name, directory in adapters.items():
        config = read_adapter_config(name, directory)
        fix = f"Serve the adapter with its base model{base_of(config)}, or export it again."
        with _load_errors(directory, f"adapter {name!r}", fix):
            peft = _add_adapter(model, peft, names[name], directory)
    return LoadedModel(model, peft, names)


def _add_adapter(model: PreTrainedModel, peft: PeftModel | None, name: str, directory: Path) -> PeftModel:
    """The model with one more adapter; raises ValueError if names or shapes of its matrices do not fit."""
    from peft import PeftConfig, PeftModel

    if peft is None:
        peft = PeftModel(model, PeftConfig.from_pretrained(str(directory)), name)
    report = peft.load_adapter(str(directory), name, torch_device=str(model.device))
    for problem, keys in {"lacks": report.missing_keys, "has unknown": report.unexpected_keys}.items():
        if keys:
            raise ValueError(f"it {problem} {keys[0]!r} ({len(keys)} in all)")
    peft.train(False)
    return peft


def _missing_config(directory: Path) -> JobError:
    if (directory / ADAPTER_CONFIG).is_file():
        return JobError(f"{directory} is a LoRA adapter: serve its base model with --adapter NAME={directory}.")
    if not directory.is_dir():
        return JobError(f"there is no folder {directory}. Name an export directory or a transformers model.")
    return JobError(f"{directory} has no {_MODEL_CONFIG}. Name an export directory or a transformers model.")


@contextmanager
def _load_errors(directory: Path, what: str, fix: str) -> Iterator[None]:
    """Turn what the libraries raise for damaged or unfit files into a JobError, without progress bars."""
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # nothing is wrong with the files: see memory_errors
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError) as error:
        reason = textwrap.shorten(str(error) or type(error).__name__, width=300, placeholder=" ...")
        raise JobError(f"the {what} in {directory} cannot be loaded: {reason} {fix}") from error
    finally:
        if bars:
            logging.enable_progress_bar()
