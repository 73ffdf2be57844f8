"""A loaded model as the engine uses it: its limits, its forward passes, and the LoRA adapter that is active."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import MoEModelOutput
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from spotune.errors import JobError
from spotune_serve.engine.generation_settings import GenerationSettings

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel

Task = Literal["causal", "seq2seq"]

_RELATIVE_POSITIONS = frozenset({"bloom", "mpt", "t5", "mt5", "umt5", "longt5", "switch_transformers"})
"""Model types without position ids whose attention depends on distances only, so that left padding changes nothing."""


class LoadedModel:
    """A model, its settings and its LoRA adapters.

    Args:
        model: a causal or encoder-decoder model.
        peft: the same model with adapters injected; None if there are none.
        adapters: name in requests -> name in `peft`.

    Attributes:
        name: class name of the model.
        seq2seq: whether it is an encoder-decoder model.
        can_pad: whether rows of different lengths can be decoded together, padded on the left.
        vocabulary: number of token ids.
        max_positions: maximum length of a sequence; None if the model has no limit.

    Raises:
        JobError: the architecture or its generation configuration is not supported.
    """

    def __init__(
        self, model: PreTrainedModel, peft: PeftModel | None = None, adapters: Mapping[str, str] | None = None
    ) -> None:
        self._model: Any = model
        self._tuner: Any = getattr(peft, "base_model", None)
        self._adapters = dict(adapters or {})
        self._active = ""
        self._encoder_width = 0
        config: Any = model.config.get_text_config(decoder=True)
        self.name = type(model).__name__
        self.seq2seq = task_of(self.name) == "seq2seq"
        self.vocabulary = int(config.vocab_size)
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        parameters = inspect.signature(type(model).forward).parameters
        takes_positions = not self.seq2seq and "position_ids" in parameters
        self._position_input = takes_positions
        self.can_pad = takes_positions or model.config.model_type in _RELATIVE_POSITIONS
        self._last_logits_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        _check_architecture(model)
        self.settings = GenerationSettings.of(model)
        if self._tuner is not None:
            self._tuner.disable_adapter_layers()

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        device: torch.device = self._model.device
        return device

    @property
    def adapters(self) -> frozenset[str]:
        """The names of the adapters that requests may ask for."""
        return frozenset(self._adapters)

    def activate(self, adapter: str) -> None:
        """Use an adapter in the following forward passes; an empty name is the base model."""
        if adapter == self._active:
            return
        if adapter:
            self._tuner.set_adapter(self._adapters[adapter], inference_mode=True)
            self._tuner.enable_adapter_layers()
        else:
            self._tuner.disable_adapter_layers()
        self._active = adapter

    def prefill(self, prompt: Sequence[int], decoder_ids: Sequence[int]) -> tuple[Tensor, list[DynamicCache]]:
        """Logits after a sequence, and its keys and values.

        Args:
            prompt: the encoder's input; not used by causal models.
            decoder_ids: all token ids of the decoder's sequence.

        Returns:
            fp32 logits [1, vocabulary], and the caches: that of the sequence and, for encoder-decoder models, that of
            the cross-attention.
        """
        ids = torch.tensor([list(decoder_ids)], device=self.device)
        cache = DynamicCache()
        if not self.seq2seq:
            return self._causal(ids, torch.ones_like(ids), torch.arange(ids.size(1), device=self.device)[None], cache)
        encoder_ids = torch.tensor([list(prompt)], device=self.device)
        encoder_mask = torch.ones_like(encoder_ids)
        encoded = self._model.get_encoder()(input_ids=encoder_ids, attention_mask=encoder_mask, return_dict=True)
        caches = [cache, DynamicCache()]
        self._encoder_width = encoded.last_hidden_state.size(-1)
        logits = self._decoder(ids, torch.ones_like(ids), encoder_mask, encoded, caches)
        return logits, caches

    def decode(
        self, tokens: Sequence[int], mask: Tensor, encoder_mask: Tensor | None, caches: list[DynamicCache]
    ) -> Tensor:
        """fp32 logits [batch, vocabulary] after one more token per row. The tokens' keys and values join the caches.

        Args:
            tokens: the new token of each row.
            mask: 1 for tokens, 0 for padding on the left [batch, cached + 1].
            encoder_mask: the same for the encoder's tokens [batch, encoder length]; None for causal models.
            caches: as `prefill` returns them, with one row per token.
        """
        ids = torch.tensor([[token] for token in tokens], device=self.device)
        if encoder_mask is None:
            return self._causal(ids, mask, mask.sum(dim=1, keepdim=True) - 1, caches[0])[0]
        # The cross-attention's keys and values are cached: of the encoder's states only the shape is read.
        zero = torch.zeros((), dtype=self._model.dtype, device=self.device)
        states: Any = zero.expand(*encoder_mask.shape, self._encoder_width)
        return self._decoder(ids, mask, encoder_mask, MoEModelOutput(last_hidden_state=states), caches)

    def _causal(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache
    ) -> tuple[Tensor, list[DynamicCache]]:
        inputs = {"position_ids": positions} if self._position_input else {}
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
            **inputs,
            **self._last_logits_only,
        )
        return output.logits[:, -1].float(), [cache]

    def _decoder(
        self, ids: Tensor, mask: Tensor, encoder_mask: Tensor, encoded: Any, caches: list[DynamicCache]
    ) -> Tensor:
        output = self._model(
            encoder_outputs=encoded,
            attention_mask=encoder_mask,
            decoder_input_ids=ids,
            decoder_attention_mask=mask,
            past_key_values=EncoderDecoderCache(*caches),
            use_cache=True,
            return_dict=True,
        )
        logits: Tensor = output.logits[:, -1].float()
        return logits


def task_of(architecture: str) -> Task | None:
    """How transformers uses a model class: as a causal or as an encoder-decoder language model, or as neither."""
    if architecture in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values():
        return "seq2seq"
    return "causal" if architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() else None


def default_architecture(config: PreTrainedConfig) -> str:
    """The model class for a configuration that names none; if there is none, the configuration's model type."""
    seq2seq, causal = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    names: Mapping[str, str] = seq2seq if config.is_encoder_decoder else causal
    return names.get(config.model_type, config.model_type)


def unsupported_architecture(architecture: str) -> JobError:
    """The error for a model that is neither causal nor an encoder-decoder model."""
    return JobError(
        f"{architecture} is neither a causal nor an encoder-decoder language model, so it cannot generate text. Serve "
        "a model of a class such as LlamaForCausalLM or T5ForConditionalGeneration."
    )


def _check_architecture(model: PreTrainedModel) -> None:
    config: Any = model.config
    name = type(model).__name__
    task = task_of(name)
    if task is None or bool(config.is_encoder_decoder) != (task == "seq2seq") or _is_encoder(config):
        raise unsupported_architecture(name)
    if task == "causal" and "past_key_values" not in inspect.signature(type(model).forward).parameters:
        raise _unsupported_cache(name, "it keeps no keys and values between tokens")
    supported = {DynamicLayer, DynamicSlidingWindowLayer}
    if (
        getattr(model, "_is_stateful", False)
        or {type(layer) for layer in DynamicCache(config=config).layers} - supported
    ):
        raise _unsupported_cache(name, "it keeps a recurrent state, or shares keys and values between layers")


def _is_encoder(config: Any) -> bool:
    """Whether a BERT-like model is configured as an encoder: its attention then also reads the tokens to the right."""
    return (
        hasattr(config, "add_cross_attention")
        and getattr(config, "is_decoder", True) is False
        and not (config.is_encoder_decoder)
    )


def _unsupported_cache(architecture: str, reason: str) -> JobError:
    return JobError(
        f"{architecture} cannot be decoded in batches by this engine: {reason}. Serve it with another engine, such as "
        "vLLM."
    )
