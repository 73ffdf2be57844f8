"""The model to train and, for parameter-efficient finetuning, its adapter."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spotune.custom_resource.base import (
    OptionalSource,
    PositiveInt,
    SecretKeyRef,
    Section,
    Source,
    expecting,
    invalid,
)


class ModelSpec(Section):
    """The model: its source, its task and the precision it is trained in."""

    source: Source
    """A transformers model: hf://owner/name on the Hugging Face Hub, or the path of a folder."""
    revision: str = "main"
    """Branch, tag or commit of a model on the Hugging Face Hub. It is resolved to a commit at the first start."""
    task: Literal["causal", "seq2seq"] = "causal"
    """causal: a decoder that continues a text. seq2seq: an encoder-decoder such as T5 that maps a text to another."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Precision of weights and activations in forward and backward. The optimizer keeps float32 master weights."""
    initialise: Literal["pretrained", "random"] = "pretrained"
    """pretrained: load the source's weights. random: use only its configuration and initialise the weights randomly."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Enable it only for sources that you trust."""
    token_secret_ref: SecretKeyRef | None = None
    """Secret with the token for a private or gated model."""
    tokenizer: OptionalSource = ""
    """Source of the tokenizer: hf://owner/name or the path of a folder. Empty: the model's own."""

    @model_validator(mode="after")
    def _check_precision(self) -> Self:
        if self.dtype == "float16" and self.task == "seq2seq":
            reason = "float16 overflows in T5-style models (its largest value is 65504): use bfloat16 or float32"
            invalid("dtype", reason)
        return self


class LoraSpec(Section):
    """Low-rank adaptation (Hu et al. 2021, https://arxiv.org/abs/2106.09685)."""

    r: PositiveInt = 16
    """Rank of the update matrices."""
    alpha: Annotated[float, Field(gt=0)] = 32
    """Scaling factor. The update is multiplied by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability on the adapter's input."""
    target_modules: Annotated[Literal["all-linear"] | list[str], expecting("all-linear or a list of module names")] = (
        "all-linear"
    )
    """Modules that get an adapter: all-linear, or a list of module names."""


class AdapterSpec(Section):
    """Parameter-efficient finetuning. Without it, all parameters are trained."""

    lora: LoraSpec
    """Low-rank adaptation: trains small matrices beside the frozen weights."""
    quantization: Literal["none", "nf4"] = "none"
    """Format of the frozen weights. none: model.dtype. nf4: layers' matrices in 4 bits (QLoRA), up to ZeRO stage 2."""
