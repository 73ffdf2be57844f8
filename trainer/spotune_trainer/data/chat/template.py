"""A tokenizer's chat template, rendered by transformers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers.utils.chat_template_utils import render_jinja_template

from spotune.prompting.content import rendering_errors
from spotune.prompting.template import RowError
from spotune_trainer.data.chat.messages import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_RENDERING_ERRORS: tuple[type[Exception], ...] = (*rendering_errors(), IndexError)


class TemplateRefusalError(RowError):
    """The chat template raised an error for these messages."""


class ChatTemplate:
    """The chat template of a tokenizer.

    Attributes:
        name: The tokenizer's name, for messages.
        eos_token: The tokenizer's end-of-text token.
        added_tokens: Texts of the tokens that were added to the vocabulary, longest first.
        special_tokens: Those of them that are special.

    Raises:
        ValueError: The tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        try:
            self._text(())
        except ValueError as error:
            raise ValueError(
                "messages need a tokenizer with a chat template, which this one has not; use prompt and completion"
            ) from error
        self.name = f"the chat template of {tokenizer.name_or_path or type(tokenizer).__name__}"
        self.eos_token = str(tokenizer.eos_token or "")
        added = list(getattr(tokenizer, "added_tokens_decoder", {}).values())
        special = {str(token) for token in tokenizer.all_special_tokens} | {str(t) for t in added if t.special}
        self.special_tokens = sorted(special, key=len, reverse=True)
        self.added_tokens = sorted(special | {str(token) for token in added}, key=len, reverse=True)

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool = False) -> str:
        """The messages as text; with ``generation`` also the beginning of the answer that is to follow.

        Raises:
            TemplateRefusalError: The template raises an error.
        """
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=generation
                )
            )
        except _RENDERING_ERRORS as error:
            raise TemplateRefusalError(f"{self.name} cannot render the messages: {error}") from error

    def has_generation_segments(self, tools: Sequence[dict[str, Any]]) -> bool:
        """Whether the template marks what the assistant generates, by ``{% generation %}``."""
        return bool(_GENERATION_TAG.search(self._text(tools)))

    def generation_segments(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The rendered messages, and the ranges of characters that the template marks.

        Raises:
            TemplateRefusalError: The template raises an error.
        """
        special: dict[str, Any] = dict(self._tokenizer.special_tokens_map)
        render: Any = render_jinja_template  # its annotation says that it returns text
        try:
            texts, segments = render(
                [list(messages)],
                tools=list(tools) or None,
                chat_template=self._text(tools),
                return_assistant_tokens_mask=True,
                **special,
            )
        except _RENDERING_ERRORS as error:
            raise TemplateRefusalError(f"{self.name} cannot render the messages: {error}") from error
        return texts[0], [(start, end) for start, end in segments[0]]

    def _text(self, tools: Sequence[dict[str, Any]]) -> str:
        return self._tokenizer.get_chat_template(tools=list(tools) or None)
