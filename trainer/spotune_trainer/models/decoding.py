"""Greedy generation from tokenized prompts, for evaluation, `spotune predict` and the export's configuration."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class HeartbeatCriteria(StoppingCriteria):
    """Calls back after each token, and never stops generation. An exception from the callback ends it."""

    def __init__(self, heartbeat: Callable[[], None]) -> None:
        self._heartbeat = heartbeat

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """False for each sequence of `input_ids` [batch, sequence]: none is finished."""
        self._heartbeat()
        return torch.zeros(input_ids.size(0), dtype=torch.bool, device=input_ids.device)


class StopTextCriteria(StoppingCriteria):
    """Ends a sequence once its answer contains one of some texts.

    Args:
        tokenizer: decodes the answers.
        texts: that end a sequence.
        prompt_tokens: tokens before the answers, with padding.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._prompt_tokens = prompt_tokens
        longest = max((len(tokenizer.encode(text, add_special_tokens=False)) for text in texts), default=0)
        self._last_tokens = longest + 2  # a text may be tokenized otherwise within an answer

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Whether each sequence of `input_ids` [batch, sequence] is finished."""
        start = max(self._prompt_tokens, input_ids.size(1) - self._last_tokens)
        suffixes = [self._tokenizer.decode(answer) for answer in input_ids[:, start:].tolist()]
        finished = [any(text in suffix for text in self._texts) for suffix in suffixes]
        return torch.tensor(finished, dtype=torch.bool, device=input_ids.device)


def generation_config_with_special_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pretrained: bool
) -> GenerationConfig:
    """The model's generation configuration, with the special tokens of the tokenizer that it is trained with.

    A pretrained model keeps its own end-of-text tokens in addition to the tokenizer's (chat models have several). For
    a model trained from scratch, those are defaults of its configuration class and may be ordinary tokens here.
    """
    config = copy.deepcopy(model.generation_config)
    eos_ids = {int(token) for token in [tokenizer.eos_token_id] if token is not None}
    if pretrained or not eos_ids:
        own = config.eos_token_id
        eos_ids |= set(own if isinstance(own, list) else [] if own is None else [own])
    config.eos_token_id = sorted(eos_ids)[0] if len(eos_ids) == 1 else sorted(eos_ids)
    config.pad_token_id = tokenizer.pad_token_id
    if model.config.is_encoder_decoder:
        config.decoder_start_token_id = model.config.decoder_start_token_id
    return config


def greedy_config(base: GenerationConfig, max_new_tokens: int) -> GenerationConfig:
    """`base` without sampling or beam search, for at most `max_new_tokens` tokens."""
    config = copy.deepcopy(base)
    config.update(
        do_sample=False,
        num_beams=1,
        temperature=None,
        top_k=None,
        top_p=None,
        max_length=None,
        max_new_tokens=max_new_tokens,
    )
    config.use_cache = True
    return config


def generate_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    stop: Sequence[str] = (),
    heartbeat: Callable[[], None] = lambda: None,
    synced_gpus: bool = False,
) -> list[list[int]]:
    """Generate an answer to each prompt, in one batch.

    Args:
        model: on the device to generate on.
        tokenizer: the model's; it must have a padding token.
        prompts: token ids of any lengths; padded here, on the left for causal models, on the right for seq2seq.
        config: see `greedy_config`.
        stop: texts that end an answer; it contains them.
        heartbeat: called once a token; an exception from it ends the generation.
        synced_gpus: continue until every rank is done, which ZeRO stage 3 requires.

    Returns:
        The token ids of the answers, with special tokens and padding.
    """
    causal = not model.config.is_encoder_decoder
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.full((len(prompts), width), int(tokenizer.pad_token_id), dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        place = slice(width - len(prompt), width) if causal else slice(0, len(prompt))
        input_ids[row, place] = torch.as_tensor(prompt, dtype=torch.long)
        mask[row, place] = 1
    criteria: list[StoppingCriteria] = [HeartbeatCriteria(heartbeat)]
    if stop:
        criteria.append(StopTextCriteria(tokenizer, stop, width if causal else 0))
    generate: Any = model.generate
    tokens: Tensor = generate(
        input_ids=input_ids.to(model.device),
        attention_mask=mask.to(model.device),
        generation_config=config,
        stopping_criteria=StoppingCriteriaList(criteria),
        synced_gpus=synced_gpus,
    )
    answers: list[list[int]] = (tokens[:, width:] if causal else tokens).tolist()
    return answers


def generate_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    heartbeat: Callable[[], None] = lambda: None,
    synced_gpus: bool = False,
) -> list[str]:
    """The answers of `generate_tokens` as text, without special tokens."""
    answers = generate_tokens(model, tokenizer, prompts, config, heartbeat=heartbeat, synced_gpus=synced_gpus)
    return [
        str(tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        for answer in answers
    ]
