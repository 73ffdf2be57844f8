"""Reads a Hugging Face `config.json` into an `Architecture`.

The model families below differ in the biases and norms of their layers; all sizes come from the configuration. Missing
keys have the defaults of the `transformers` configuration classes, because published files often omit them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from spotune.errors import JobError
from spotune.plan.architecture import Architecture, Norm, Stack


class _Config:
    """A `config.json` with typed lookups, whose errors name the key and the model type."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.model_type = str(values["model_type"])

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is set, as a positive integer.

        Raises:
            JobError: none of them is set and there is no default, or the value is not a positive integer.
        """
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise JobError(
                    f"config.json of this {self.model_type} model: {name} is {value!r}, expected a whole number > 0."
                )
            return value
        if default is None:
            raise JobError(
                f"config.json of this {self.model_type} model has no {' or '.join(names)}, so its size is unknown. "
                "Pass the config.json of the weights with `--config FILE`."
            )
        return default

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        return default if value is None else bool(value)

    def text(self, *names: str, default: str) -> str:
        return next((str(self.values[name]) for name in names if self.values.get(name)), default)

    def any_positive(self, *names: str) -> bool:
        return any((self.values.get(name) or 0) > 0 for name in names)


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture described by a parsed `config.json`.

    Raises:
        JobError: `model_type` is missing or not supported, or a size is missing.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise JobError(
            "This config.json has no model_type, so it is not the configuration of a transformers model. "
            "Pass the one in the folder of the model's weights with `--config FILE`."
        )
    reader = _READERS.get(model_type) or _ENCODERS.get(model_type)
    if reader is None:
        supported = (*SUPPORTED_MODEL_TYPES, *ENCODER_MODEL_TYPES)
        close = difflib.get_close_matches(model_type, supported, n=1)
        raise JobError(
            f"The size of a {model_type!r} model can't be computed from its config.json"
            + (f" (did you mean {close[0]!r}?)" if close else "")
            + f"; supported types are {', '.join(supported)}. The model can still be trained: set "
            "execution.microBatchSize, execution.zeroStage and execution.gradientCheckpointing instead of auto."
        )
    return reader(_Config(config))


def _t5(config: _Config) -> Architecture:
    hidden = config.integer("d_model", "hidden_size")
    heads = config.integer("num_heads", "num_attention_heads")
    projection = config.text("feed_forward_proj", default="gated-gelu" if config.model_type == "mt5" else "relu")
    layers = config.integer("num_layers", "num_hidden_layers")
    # transformers maps "gated-gelu" to gelu_new, for compatibility with published checkpoints.
    activation = "gelu_new" if projection == "gated-gelu" else projection.removeprefix("gated-")

    def stack(layers: int, cross_attention: bool) -> Stack:
        return Stack(
            layers=layers,
            hidden_size=hidden,
            heads=heads,
            key_value_heads=heads,
            head_size=config.integer("d_kv", "head_dim", default=64),
            feed_forward_size=config.integer("d_ff"),
            norm="rms-float32",
            norms_per_layer=3 if cross_attention else 2,
            activation=activation,
            gated=projection.startswith("gated-"),
            cross_attention=cross_attention,
            extra_parameters=config.integer("relative_attention_num_buckets", default=32) * heads + hidden,
        )

    dropout = config.any_positive("dropout_rate") or "dropout_rate" not in config.values
    return Architecture(
        model_type=config.model_type,
        vocabulary_size=config.integer("vocab_size"),
        hidden_size=hidden,
        encoder=stack(layers, cross_attention=False),
        decoder=stack(config.integer("num_decoder_layers", default=layers), cross_attention=True),
        untied_when_loaded=not config.flag("tie_word_embeddings", default=True)
        # transformers overwrites tie_word_embeddings and derives scale_decoder_outputs from the file's value.
        or not config.flag("scale_decoder_outputs", default=True),
        dropout=dropout,
        feed_forward_dropout=dropout,
        relative_attention=True,
    )


def _bart(config: _Config) -> Architecture:
    hidden = config.integer("d_model", "hidden_size")

    def stack(name: str, cross_attention: bool) -> Stack:
        heads = config.integer(f"{name}_attention_heads")
        return Stack(
            layers=config.integer(f"{name}_layers"),
            hidden_size=hidden,
            heads=heads,
            key_value_heads=heads,
            head_size=hidden // heads,
            feed_forward_size=config.integer(f"{name}_ffn_dim"),
            norm="layer",
            norms_per_layer=3 if cross_attention else 2,
            activation=config.text("activation_function", default="gelu"),
            cross_attention=cross_attention,
            query_key_value_bias=True,
            attention_output_bias=True,
            feed_forward_bias=True,
            # Learned positions start at 2 (fairseq's padding offset), and the embedding has its own norm.
            extra_parameters=(config.integer("max_position_embeddings", default=1024) + 2) * hidden + 2 * hidden,
        )

    return Architecture(
        model_type=config.model_type,
        vocabulary_size=config.integer("vocab_size"),
        hidden_size=hidden,
        encoder=stack("encoder", cross_attention=False),
        decoder=stack("decoder", cross_attention=True),
        tied_embeddings=config.flag("tie_word_embeddings", default=True),
        dropout=config.any_positive("dropout"),
        feed_forward_dropout=config.any_positive("activation_dropout"),
    )


def _gpt2(config: _Config) -> Architecture:
    hidden = config.integer("n_embd", "hidden_size")
    return _biased_decoder(
        config,
        hidden=hidden,
        layers=config.integer("n_layer", "num_hidden_layers"),
        heads=config.integer("n_head", "num_attention_heads"),
        feed_forward=config.integer("n_inner", default=4 * hidden),
        activation=config.text("activation_function", default="gelu_new"),
        extra_parameters=config.integer("n_positions", "max_position_embeddings", default=1024) * hidden,
        tied=config.flag("tie_word_embeddings", default=True),
        dropout=config.any_positive("resid_pdrop"),
    )


def _gpt_neox(config: _Config) -> Architecture:
    hidden = config.integer("hidden_size")
    return _biased_decoder(
        config,
        hidden=hidden,
        layers=config.integer("num_hidden_layers"),
        heads=config.integer("num_attention_heads"),
        feed_forward=config.integer("intermediate_size"),
        activation=config.text("hidden_act", default="gelu"),
        tied=config.flag("tie_word_embeddings", default=False),
        attention_bias=config.flag("attention_bias", default=True),
        rotated_copies=True,
        dropout=config.any_positive("hidden_dropout"),
    )


def _bloom(config: _Config) -> Architecture:
    hidden = config.integer("hidden_size", "n_embed")
    return _biased_decoder(
        config,
        hidden=hidden,
        layers=config.integer("n_layer", "num_hidden_layers"),
        heads=config.integer("n_head", "num_attention_heads"),
        feed_forward=4 * hidden,
        activation="gelu",
        extra_parameters=2 * hidden,  # the norm of the embedding
        tied=config.flag("tie_word_embeddings", default=True),
        dropout=config.any_positive("hidden_dropout"),
        eager_attention_only=True,
    )


def _bert(config: _Config) -> Architecture:
    hidden = config.integer("hidden_size", default=768)
    segments = config.integer("type_vocab_size", default=2)
    return _encoder(
        config,
        hidden=hidden,
        layers=config.integer("num_hidden_layers", default=12),
        heads=config.integer("num_attention_heads", default=12),
        feed_forward=config.integer("intermediate_size", default=3072),
        segments=segments,
        dropout=config.any_positive("hidden_dropout_prob") or "hidden_dropout_prob" not in config.values,
    )


def _distilbert(config: _Config) -> Architecture:
    return _encoder(
        config,
        hidden=config.integer("dim", "hidden_size", default=768),
        layers=config.integer("n_layers", "num_hidden_layers", default=6),
        heads=config.integer("n_heads", "num_attention_heads", default=12),
        feed_forward=config.integer("hidden_dim", "intermediate_size", default=3072),
        segments=0,
        dropout=config.any_positive("dropout") or "dropout" not in config.values,
    )


def _biased_stack(hidden: int, layers: int, heads: int, feed_forward: int) -> Stack:
    """Layers with layer norms, biases in all matrices, and no grouped-query attention."""
    return Stack(
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        key_value_heads=heads,
        head_size=hidden // heads,
        feed_forward_size=feed_forward,
        norm="layer",
        query_key_value_bias=True,
        attention_output_bias=True,
        feed_forward_bias=True,
    )


def _encoder(
    config: _Config, *, hidden: int, layers: int, heads: int, feed_forward: int, segments: int, dropout: bool
) -> Architecture:
    """BERT and descendants: learned positions, layer norms, biases in all matrices, a norm after the embeddings."""
    stack = _biased_stack(hidden, layers, heads, feed_forward)
    positions = config.integer("max_position_embeddings", default=512)
    return Architecture(
        model_type=config.model_type,
        vocabulary_size=config.integer("vocab_size", default=30522),
        hidden_size=hidden,
        decoder=stack,
        extra_parameters=(positions + segments + 2) * hidden,
        dropout=dropout,
        encoder_only=True,
    )


def _biased_decoder(
    config: _Config,
    *,
    hidden: int,
    layers: int,
    heads: int,
    feed_forward: int,
    activation: str,
    tied: bool,
    dropout: bool,
    extra_parameters: int = 0,
    attention_bias: bool = True,
    rotated_copies: bool = False,
    eager_attention_only: bool = False,
) -> Architecture:
    """GPT-2 and descendants: layer norms, biases in all matrices, no grouped-query attention, a final norm."""
    stack = replace(
        _biased_stack(hidden, layers, heads, feed_forward),
        activation=activation,
        query_key_value_bias=attention_bias,
        attention_output_bias=attention_bias,
        rotated_copies=rotated_copies,
        extra_parameters=2 * hidden,
    )
    return Architecture(
        model_type=config.model_type,
        vocabulary_size=config.integer("vocab_size"),
        hidden_size=hidden,
        decoder=stack,
        tied_embeddings=tied,
        extra_parameters=extra_parameters,
        dropout=dropout,
        eager_attention_only=eager_attention_only,
    )


@dataclass(frozen=True)
class _LlamaFamily:
    """How a descendant of Llama differs: norms, biases, and the defaults of its configuration class."""

    norm: Norm = "rms"
    norms_per_layer: int = 2
    head_norms: bool = False
    always_query_key_value_bias: bool = False
    tied_by_default: bool = False
    key_value_heads: int | None = None
    head_size: int | None = None
    rotated_copies: bool = False
    capped: bool = False

    def __call__(self, config: _Config) -> Architecture:
        """The architecture for a configuration of this model type."""
        hidden = config.integer("hidden_size")
        heads = config.integer("num_attention_heads")
        # A missing key means the class's default; null means as many key-value heads as query heads.
        key_value_heads = heads if "num_key_value_heads" in config.values else self.key_value_heads or heads
        attention_bias = config.flag("attention_bias", default=False)
        stack = Stack(
            layers=config.integer("num_hidden_layers"),
            hidden_size=hidden,
            heads=heads,
            key_value_heads=config.integer("num_key_value_heads", default=key_value_heads),
            head_size=config.integer("head_dim", default=self.head_size or hidden // heads),
            feed_forward_size=config.integer("intermediate_size"),
            norm=self.norm,
            norms_per_layer=self.norms_per_layer,
            activation=config.text("hidden_activation", "hidden_act", default="silu"),
            gated=True,
            query_key_value_bias=self.always_query_key_value_bias or attention_bias,
            attention_output_bias=attention_bias,
            feed_forward_bias=config.flag("mlp_bias", default=False),
            head_norms=self.head_norms,
            rotated_copies=self.rotated_copies,
            extra_parameters=hidden,
        )
        return Architecture(
            model_type=config.model_type,
            vocabulary_size=config.integer("vocab_size"),
            hidden_size=hidden,
            decoder=stack,
            tied_embeddings=config.flag("tie_word_embeddings", default=self.tied_by_default),
            dropout=config.any_positive("resid_pdrop"),
            softcapped_logits=bool(config.values.get("final_logit_softcapping", self.capped)),
            softcapped_scores=bool(config.values.get("attn_logit_softcapping", self.capped)),
        )


_READERS: dict[str, Callable[[_Config], Architecture]] = {
    "bart": _bart,
    "bloom": _bloom,
    "gemma": _LlamaFamily(norm="rms-float32", tied_by_default=True, key_value_heads=16, head_size=256),
    "gemma2": _LlamaFamily(
        norm="rms-float32",
        norms_per_layer=4,
        tied_by_default=True,
        key_value_heads=4,
        head_size=256,
        capped=True,
    ),
    "gemma3_text": _LlamaFamily(
        norm="rms-float32", norms_per_layer=4, head_norms=True, tied_by_default=True, key_value_heads=4, head_size=256
    ),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _LlamaFamily(),
    "mistral": _LlamaFamily(key_value_heads=8),
    "mt5": _t5,
    "phi3": _LlamaFamily(rotated_copies=True),
    "qwen2": _LlamaFamily(key_value_heads=32, always_query_key_value_bias=True),
    "qwen3": _LlamaFamily(key_value_heads=32, head_norms=True, head_size=128),
    "t5": _t5,
}

_ENCODERS: dict[str, Callable[[_Config], Architecture]] = {
    "bert": _bert,
    "distilbert": _distilbert,
    "roberta": _bert,
    "xlm-roberta": _bert,
}

SUPPORTED_MODEL_TYPES = tuple(sorted(_READERS))
"""Model types that generate text, whose size can be computed."""
ENCODER_MODEL_TYPES = tuple(sorted(_ENCODERS))
"""Model types of encoders, whose size can be computed."""
