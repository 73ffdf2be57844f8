"""The model that workers hold, as lm-evaluation-harness sees it: this process has its tokenizer, and asks for the rest.

Prompts, truncation and stop sequences are those of the harness's own class for transformers models, so scores are those
of its own command. That class would cut requests into batches; here they are one question, which the workers cut.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

Ask = Callable[[Mapping[str, Any]], Any]


class WorkersModel(HFLM):  # type: ignore[misc]
    """A model without weights.

    Args:
        folder: configuration and tokenizer of the model.
        ask: what the workers answer to a question; see `spotune_trainer.evaluation.task_scores`.
    """

    def __init__(self, folder: str, ask: Ask) -> None:
        model = SimpleNamespace(config=AutoConfig.from_pretrained(folder), device=torch.device("cpu"))
        super().__init__(model, tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=sys.maxsize)
        self._ask = ask

    def get_model_info(self) -> dict[str, Any]:
        """Nothing: the model has no name and no revision."""
        return {}

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation after its context, and whether greedy decoding would write it."""
        pairs = []
        for _text, context, continuation in requests:
            assert context, "the context of a request is empty"
            assert 0 < len(continuation) <= self.max_length, f"a continuation has {len(continuation)} tokens"
            if self.backend == "causal":
                inputs = (context + continuation)[-(self.max_length + 1) :][:-1]
            else:
                inputs = context[-self.max_length :]
            pairs.append((inputs, continuation))
        answers = self._ask({"loglikelihood": {"pairs": pairs}})
        return [(log_likelihood, is_greedy) for log_likelihood, is_greedy in answers]

    def _model_generate(
        self,
        context: Tensor,
        max_length: int,
        stop: list[str],
        attention_mask: Tensor | None = None,
        **generation_kwargs: Any,
    ) -> Tensor:
        """The tokens of each prompt of `context` [prompts, sequence] with its answer, padded to the longest."""
        assert attention_mask is not None
        causal = self.backend == "causal"
        options = {name: value for name, value in generation_kwargs.items() if name not in ("do_sample", "temperature")}
        question = {
            "prompts": [row[mask.bool()].tolist() for row, mask in zip(context, attention_mask, strict=True)],
            "stop": stop,
            "maxNewTokens": max_length - context.size(1),
            "options": options,
        }
        answers: list[list[int]] = self._ask({"generate": question})
        width = max(map(len, answers))
        tokens = torch.full((len(answers), width), int(self.tokenizer.pad_token_id))
        for row, answer in enumerate(answers):
            tokens[row, : len(answer)] = torch.tensor(answer, dtype=torch.long)
        return torch.cat([context, tokens], dim=1) if causal else tokens
