"""Low-rank adapters: small matrices that are trained beside a model whose own weights stay as they are (by `peft`).

LoRA adds `alpha / r * B A` to a weight matrix, A of shape [r, in] and B of [out, r] (Hu et al. 2021, section 4.1). B
begins as zeros, and A is drawn from `training.seed`: every rank and attempt has the same ones. A checkpoint holds the
matrices alone; the weights beside them are read from the source again, and quantised again where they are kept in 4
bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spotune.errors import JobError
from spotune.job import AdapterSpec, FinetuneJob
from spotune_trainer.models.nf4 import quantise_layers

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def attach_adapter(model: PreTrainedModel, job: FinetuneJob) -> PreTrainedModel:
    """The model with its adapter, whose matrices are all that is trained; as it is where the job has no adapter.

    Raises:
        JobError: the adapter's target modules are not in the model, or it has no layers that can be quantised.
    """
    if job.spec.adapter is not None:
        if job.spec.adapter.quantization == "nf4":
            quantise_layers(model)
        _adapt(model, job, job.spec.adapter)
    return model


def fill_adapter(model: PreTrainedModel, job: FinetuneJob, parameters: Mapping[str, Tensor]) -> PeftModel:
    """The model with its adapter trained.

    Args:
        model: the one that the adapter was trained beside, as its source has it.
        job: has an adapter.
        parameters: fp32 masters of the adapter's matrices, by their names in the model of `attach_adapter`.

    Raises:
        JobError: the matrices are not those of the job's adapter.
    """
    assert job.spec.adapter is not None
    adapted = _adapt(model, job, job.spec.adapter)
    places = {name: place for name, place in model.named_parameters() if place.requires_grad}
    wrong = sorted(
        name
        for name in places.keys() | parameters.keys()
        if name not in places or name not in parameters or places[name].shape != parameters[name].shape
    )
    if wrong:
        raise JobError(
            f"the adapter's matrix {wrong[0]!r} ({len(wrong)} in all) does not fit model.source: the model changed "
            "since the run began. Put it back and export again."
        )
    for name, place in places.items():
        place.data = parameters[name].detach().to("cpu", torch.float32, copy=True)
    return adapted


def _adapt(model: PreTrainedModel, job: FinetuneJob, adapter: AdapterSpec) -> PeftModel:
    """Put the adapter's matrices into the model, beside the modules they belong to."""
    from peft import LoraConfig, TaskType, get_peft_model

    lora, spec = adapter.lora, job.spec.model
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type=TaskType.SEQ_2_SEQ_LM if spec.task == "seq2seq" else TaskType.CAUSAL_LM,
        base_model_name_or_path=spec.source.removeprefix("hf://"),
        revision=spec.revision if spec.source.startswith("hf://") else None,
    )
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by names that it is giving up
            torch.manual_seed(job.spec.training.seed)
            # Of the model's own dtype, as every other parameter: the masters are fp32.
            adapted: PeftModel = get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise JobError(
            f"adapter.lora.targetModules: {lora.target_modules} does not fit model.source: {error}. Name modules of "
            "the model, such as [q_proj, v_proj], or all-linear."
        ) from error
    return adapted
