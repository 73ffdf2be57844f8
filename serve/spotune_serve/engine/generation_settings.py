"""What a model's generation configuration demands of every sequence, as `model.generate` applies it.

A request chooses between greedy decoding and sampling, and how many tokens. Everything else that changes the tokens
comes from the model's `generation_config.json`. Settings that the engine does not implement are refused when the model
is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from spotune.errors import JobError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

APPLIED: Mapping[str, tuple[Any, ...]] = {
    "sequence_bias": (None,),
    "encoder_repetition_penalty": (None, 1),
    "repetition_penalty": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "remove_invalid_values": (None, False),
    "exponential_decay_length_penalty": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "renormalize_logits": (None, False),
}
"""Setting that a logits processor applies -> the values that mean that it is off."""

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "constraints": (None,),
    "dola_layers": (None,),
    "force_words_ids": (None,),
    "forced_decoder_ids": (None,),
    "guidance_scale": (None, 1),
    "max_time": (None,),
    "penalty_alpha": (None, 0),
    "stop_strings": (None,),
    "token_healing": (None, False),
    "watermarking_config": (None,),
}
"""Setting that changes the tokens and is not implemented -> the values that mean that it is off."""


@dataclass(frozen=True)
class GenerationSettings:
    """The model's own settings.

    Attributes:
        config: the model's generation configuration.
        eos_token_ids: tokens that end a sequence.
        decoder_start: ids that the decoder's sequence starts with; empty for causal models.
    """

    config: GenerationConfig
    eos_token_ids: frozenset[int]
    decoder_start: tuple[int, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> GenerationSettings:
        """The settings of a model.

        Raises:
            JobError: a setting is not supported or invalid, or an encoder-decoder model has no start token.
        """
        config: Any = model.generation_config
        for name, neutral in REFUSED.items():
            value = getattr(config, name, None)
            if value not in neutral:
                raise JobError(
                    f"{_file_of(model)} has {name}: {value!r}, which this engine does not support. Remove {name} from "
                    "the file if you can do without it."
                )
        eos = config.eos_token_id
        ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        start = _decoder_start(model) if model.config.is_encoder_decoder else ()
        settings = cls(config, frozenset(int(token) for token in ids), start)
        try:
            settings.logits_processors((0,), 1, torch.device("cpu"))
        except (ValueError, TypeError) as error:
            raise JobError(f"{_file_of(model)} has an invalid value: {error}. Correct or remove it.") from error
        return settings

    def logits_processors(self, prompt: Sequence[int], max_tokens: int, device: torch.device) -> LogitsProcessorList:
        """The processors for one sequence, in the order of `model.generate`.

        They take ids [1, length] and logits [1, vocabulary] on `device`. The ids are those of the decoder: prompt and
        new tokens for causal models, start token and new tokens for encoder-decoder models.

        Args:
            prompt: token ids of the prompt.
            max_tokens: maximum number of new tokens of the whole sequence.
            device: of the logits.
        """
        start_length = len(self.decoder_start) or len(prompt)
        processors = LogitsProcessorList()
        processors += self._repetition(torch.tensor([list(prompt)], device=device))
        processors += self._length(start_length, device)
        processors += self._forced(start_length + max_tokens, str(device))
        processors += self._late(start_length, device)
        return processors

    def _is_on(self, name: str) -> bool:
        return getattr(self.config, name, None) not in APPLIED[name]

    def _repetition(self, prompt: torch.Tensor) -> list[Any]:
        config: Any = self.config
        found: list[Any] = []
        if self._is_on("sequence_bias"):
            found.append(SequenceBiasLogitsProcessor(config.sequence_bias))
        if self._is_on("encoder_repetition_penalty"):
            found.append(EncoderRepetitionPenaltyLogitsProcessor(config.encoder_repetition_penalty, prompt))  # type: ignore[arg-type]
        if self._is_on("repetition_penalty"):
            found.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
        if self._is_on("no_repeat_ngram_size"):
            found.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
        if self._is_on("encoder_no_repeat_ngram_size"):
            found.append(EncoderNoRepeatNGramLogitsProcessor(config.encoder_no_repeat_ngram_size, prompt))  # type: ignore[arg-type]
        if self._is_on("bad_words_ids"):
            eos = sorted(self.eos_token_ids)
            found.append(NoBadWordsLogitsProcessor(config.bad_words_ids, eos or None))
        return found

    def _length(self, start_length: int, device: torch.device) -> list[Any]:
        config: Any = self.config
        eos = torch.tensor(sorted(self.eos_token_ids), device=device)
        found: list[Any] = []
        if self._is_on("min_length") and len(eos) and not self._is_on("min_new_tokens"):
            found.append(MinLengthLogitsProcessor(config.min_length, eos, device=str(device)))
        if self._is_on("min_new_tokens") and len(eos):
            minimum = config.min_new_tokens
            found.append(MinNewTokensLengthLogitsProcessor(start_length, minimum, eos, device=str(device)))
        return found

    def _forced(self, max_length: int, device: str) -> list[Any]:
        config: Any = self.config
        found: list[Any] = []
        if self._is_on("forced_bos_token_id"):
            found.append(ForcedBOSTokenLogitsProcessor(config.forced_bos_token_id))
        if self._is_on("forced_eos_token_id"):
            found.append(ForcedEOSTokenLogitsProcessor(max_length, config.forced_eos_token_id, device=device))
        return found

    def _late(self, start_length: int, device: torch.device) -> list[Any]:
        config: Any = self.config
        found: list[Any] = []
        if self._is_on("remove_invalid_values"):
            found.append(InfNanRemoveLogitsProcessor())
        if self._is_on("exponential_decay_length_penalty") and self.eos_token_ids:
            decay = tuple(config.exponential_decay_length_penalty)
            eos = torch.tensor(sorted(self.eos_token_ids), device=device)
            found.append(ExponentialDecayLengthPenalty(decay, eos, start_length))
        if self._is_on("suppress_tokens"):
            found.append(SuppressTokensLogitsProcessor(config.suppress_tokens, device=str(device)))
        if self._is_on("begin_suppress_tokens"):
            first = start_length if start_length > 1 or config.forced_bos_token_id is None else start_length + 1
            found.append(SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, first, device=str(device)))
        if self._is_on("renormalize_logits"):
            found.append(LogitNormalization())
        return found


def _decoder_start(model: PreTrainedModel) -> tuple[int, ...]:
    config: Any = model.generation_config
    start = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
    if not isinstance(start, int):
        raise JobError(
            f"{_file_of(model)} has decoder_start_token_id: {start!r}; an encoder-decoder model needs one token id "
            "there (for T5, that of the padding token)."
        )
    return (start,)


def _file_of(model: PreTrainedModel) -> str:
    return str(Path(model.name_or_path or "") / "generation_config.json")
