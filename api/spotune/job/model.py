"""What is trained: the model and, for parameter-efficient finetuning, its adapter."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spotune.job.base import OptionalSource, Positive, SecretKeyRef, Section, Source, expecting, invalid


class ModelSpec(Section):
    """The model: where it comes from, what it does, and in which precision it is trained."""

    source: Source
    """A transformers model: hf://owner/name on the Hugging Face Hub, or the path of a folder."""
    revision: str = "main"
    """Branch, tag or commit of a model on the Hugging Face Hub; resolved to a commit at the first start."""
    task: Literal["causal", "seq2seq"] = "causal"
    """causal: a decoder that continues a text; seq2seq: an encoder-decoder such as T5 that answers one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Precision of weights and activations in forward and backward; the optimizer keeps float32 master weights."""
    initialise: Literal["pretrained", "random"] = "pretrained"
    """pretrained: start from the source's weights; random: only its configuration is used."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model; only for sources that you have read."""
    token_secret_ref: SecretKeyRef | None = None
    """Secret with the token for a private or gated model."""
    tokenizer: OptionalSource = ""
    """Source of the tokenizer, hf://owner/name or the path of a folder; empty: the model's own."""

    @model_validator(mode="after")
    def _check_precision(self) -> Self:
        if self.dtype == "float16" and self.task == "seq2seq":
            reason = "float16 overflows in T5 and models like it (its largest number is 65504): use bfloat16 or float32"
            invalid("dtype", reason)
        return self


class LoraSpec(Section):
    """Low-rank adaptation (Hu et al. 2021, https://arxiv.org/abs/2106.09685)."""

    r: Positive = 16
    """Rank of the update matrices."""
    alpha: Annotated[float, Field(gt=0)] = 32
    """Scale of the update; it is multiplied by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability on the adapter's input."""
    target_modules: Annotated[Literal["all-linear"] | list[str], expecting("all-linear or a list of module names")] = (
        "all-linear"
    )
    """Which modules get an adapter: all-linear, or a list of module names."""


class AdapterSpec(Section):
    """How few parameters are trained; without it all are."""

    lora: LoraSpec
    """Low-rank adaptation: small matrices are trained beside the weights, which stay as they are."""
    quantization: Literal["none", "nf4"] = "none"
    """Frozen weights while training: none: in model.dtype; nf4: the layers' matrices in 4 bits (QLoRA), to ZeRO 2."""
