"""LoRA adapters, by `peft`: small matrices are trained, and the model's own weights are frozen.

LoRA adds `alpha / r * B A` to a weight matrix, with A of shape [r, in] and B of shape [out, r] (Hu et al. 2021,
section 4.1). B is zero at first, and A is drawn from `training.seed`, so all ranks and attempts start with the same
values. A checkpoint holds A and B alone. A head for scores or labels is trained and saved whole. The frozen weights are
read from the model's source again, and with `adapter.quantization: nf4` quantized again.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from spotune.errors import JobError
from spotune.job import AdapterSpec, FinetuneJob
from spotune_trainer.models.heads import head_modules
from spotune_trainer.models.quantization.nf4 import is_quantized, quantize_layers

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


_TASK_TYPES: Final = {
    "causal": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
    "reward": "SEQ_CLS",
    "classification": "SEQ_CLS",
    "tokenClassification": "TOKEN_CLS",
}
"""peft's name of each kind of model."""


def attach_adapter(model: PreTrainedModel, job: FinetuneJob) -> PreTrainedModel:
    """Add the job's adapter to the model and freeze everything else. Without an adapter the model is unchanged.

    Raises:
        JobError: the model does not have the target modules, or has no layers that can be quantized.
    """
    if job.spec.adapter is not None:
        if job.spec.adapter.quantization == "nf4" and not is_quantized(model):
            quantize_layers(model, kept=_head(model, job))
        _add_lora(model, job, job.spec.adapter)
    return model


def attach_trained_adapter(model: PreTrainedModel, job: FinetuneJob, parameters: Mapping[str, Tensor]) -> PeftModel:
    """Add a trained adapter to the model, for an export.

    Args:
        model: as loaded from `model.source`.
        job: must have an adapter.
        parameters: fp32 masters of the adapter's matrices, by their names in the model that `attach_adapter` returns.

    Raises:
        JobError: names or shapes of the matrices do not fit the job's adapter and model.
    """
    assert job.spec.adapter is not None
    adapted = _add_lora(model, job, job.spec.adapter)
    targets = {name: target for name, target in model.named_parameters() if target.requires_grad}
    wrong = sorted(
        name
        for name in targets.keys() | parameters.keys()
        if name not in targets or name not in parameters or targets[name].shape != parameters[name].shape
    )
    if wrong:
        raise JobError(
            f"the adapter's matrix {wrong[0]!r} ({len(wrong)} in all) does not fit model.source: the model has changed "
            "since the run started. Restore the original model and export again."
        )
    for name, target in targets.items():
        target.data = parameters[name].detach().to("cpu", torch.float32, copy=True)
    return adapted


def _head(model: PreTrainedModel, job: FinetuneJob) -> list[str]:
    """Names of the modules of the head for scores or labels; none of a model that generates text."""
    return head_modules(model) if job.spec.has_head else []


def _add_lora(model: PreTrainedModel, job: FinetuneJob, adapter: AdapterSpec) -> PeftModel:
    """Add LoRA matrices to the target modules, in place, and a trained copy of the head."""
    from peft import LoraConfig, TaskType, get_peft_model

    lora, spec, head = adapter.lora, job.spec.model, _head(model, job)
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # typed as int; any number works
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        exclude_modules=rf"(.*\.)?({'|'.join(map(re.escape, head))})(\..*)?" if head else None,
        modules_to_save=head or None,
        task_type=TaskType(_TASK_TYPES[job.spec.model_kind]),
        base_model_name_or_path=spec.source.removeprefix("hf://"),
        revision=spec.revision if spec.source.startswith("hf://") else None,
    )
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses deprecated names of transformers
            torch.manual_seed(job.spec.training.seed)
            # No autocast: like all parameters the matrices have the model's dtype, and fp32 masters.
            adapted: PeftModel = get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise JobError(
            f"adapter.lora.targetModules: {lora.target_modules} does not fit model.source: {error}. Name modules of "
            "the model, such as [q_proj, v_proj], or all-linear."
        ) from error
    return adapted
