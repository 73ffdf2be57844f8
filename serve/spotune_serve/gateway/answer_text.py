"""Text of an answer, token by token: whole characters, stop strings cut off, equal to decoding all tokens at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenizers.decoders import ByteLevel

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_INCOMPLETE = "\ufffd"
"""Decoders write it for bytes that are not (yet) a character."""
_CONTEXT_TOKENS = 8
_MAX_WINDOW_TOKENS = 24


class TokenDecoder:
    """Decodes the tokens of one or more answers, one at a time. Shared by the answers of a model.

    Attributes:
        special: ids of special tokens, which are not part of a text.
        byte_tokens: ids of byte tokens such as `<0x0A>`. A decoder turns a whole run of them into text.
        joins_bytes: whether each token stands for bytes, whatever the others are, and the text is all bytes in order:
            byte-level BPE. Then a token after a whole character is decoded on its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = tokenizer.added_tokens_decoder
        self.special = frozenset(token for token, text in added.items() if text.special)
        self.byte_tokens = frozenset(
            token for text, token in tokenizer.get_vocab().items() if _BYTE_TOKEN.fullmatch(text)
        )
        self._texts: dict[int, str] = {}
        self._decode, backend = _decode_function(tokenizer)
        self.joins_bytes = backend is not None and isinstance(backend.decoder, ByteLevel)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens as `spotune predict` writes it, without special tokens."""
        return self._decode(list(tokens), skip_special_tokens=True)

    def text_of(self, token: int) -> str:
        """`decode` of one token. Texts are kept: there are no more of them than tokens in the vocabulary."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.decode([token])
        return text

    def decode_one(self, token: int) -> str:
        """The text of a token on its own, special or not, as log probabilities name it."""
        return self._decode([token], skip_special_tokens=False)


class IncrementalDecoder:
    """The text of a growing sequence. What `push` and `flush` return adds up to the text of all tokens.

    It decodes a window of the last tokens only. The window moves on when its second half decodes to the same text with
    and without the first half, so that a long answer does not take quadratic time.
    """

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._returned = 0  # characters of the window's text that were returned
        self._text = ""  # the window's text

    def push(self, token: int) -> str:
        """The characters that are complete with this token."""
        decoder = self._decoder
        if token in decoder.special:
            return ""
        if decoder.joins_bytes and not self._window and not (text := decoder.text_of(token)).endswith(_INCOMPLETE):
            return text
        self._window.append(token)
        self._text = decoder.decode(self._window)
        if token in decoder.byte_tokens:
            return ""
        stable = self._text.rstrip(_INCOMPLETE)
        new = stable[self._returned :]
        self._returned = max(self._returned, len(stable))
        if decoder.joins_bytes and stable == self._text:
            self._window, self._text, self._returned = [], "", 0
        elif len(self._window) >= _MAX_WINDOW_TOKENS:
            self._shorten()
        return new

    def flush(self) -> str:
        """The text that was held back; no token may follow."""
        new = self._text[self._returned :]
        self._returned = len(self._text)
        return new

    def _shorten(self) -> None:
        kept = self._window[-_CONTEXT_TOKENS:]
        if kept[0] in self._decoder.byte_tokens:
            return  # a run of byte tokens must not be divided
        text = self._decoder.decode(kept)
        common = self._decoder.decode(kept[_CONTEXT_TOKENS // 2 :]).lstrip()
        held = len(self._text) - self._returned
        if len(text) < held or not (text.endswith(common) and self._text.endswith(common) and len(common) > held):
            return
        self._window, self._text, self._returned = kept, text, len(text) - held


def _decode_function(tokenizer: PreTrainedTokenizerBase) -> tuple[Callable[..., str], Tokenizer | None]:
    """What decodes tokens without cleaning the text up, and the tokenizer of the library tokenizers that does it.

    transformers would look at the type of every token. Without a method of its own, its tokenizer adds nothing else.
    """
    from transformers import PreTrainedTokenizerFast

    kind: Any = type(tokenizer)
    plain = PreTrainedTokenizerFast
    if isinstance(tokenizer, plain) and (kind.decode, kind._decode) == (plain.decode, plain._decode):
        return tokenizer.backend_tokenizer.decode, tokenizer.backend_tokenizer
    decode: Any = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    return decode, None


class StopStrings:
    """Cuts a text at the stop string that is complete first. Holds back what may be the start of one.

    The result does not depend on how the text is divided into pieces.

    Attributes:
        found: whether a stop string was found; nothing follows.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that certainly precedes all stop strings."""
        if self.found or not self._stops:
            return "" if self.found else text
        buffer = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if matches:
            self.found, self._held = True, ""
            return buffer[: min(matches)[1]]
        self._held = buffer[len(buffer) - self._possible_start(buffer) :]
        return buffer[: len(buffer) - len(self._held)]

    def flush(self) -> str:
        """What was held back; no text may follow."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, buffer: str) -> int:
        """Length of the longest part at the buffer's right side that a stop string may start with."""
        longest = max(map(len, self._stops)) - 1
        lengths = range(min(longest, len(buffer)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(buffer[-n:]) for stop in self._stops)), 0)


class AnswerText:
    """The text of one answer.

    Args:
        decoder: the model's.
        stops: strings that end the answer; they are cut off.
        stop_tokens: tokens that end the answer and are not part of its text, special or not.

    Attributes:
        length: characters decoded so far, those held back included.
    """

    def __init__(self, decoder: TokenDecoder, stops: Sequence[str] = (), stop_tokens: Iterable[int] = ()) -> None:
        self._text = IncrementalDecoder(decoder)
        self._stops = StopStrings(stops)
        self._stop_tokens = frozenset(stop_tokens)
        self.length = 0

    @property
    def stopped(self) -> bool:
        """Whether the answer ended with a stop string."""
        return self._stops.found

    def push(self, token: int, *, last: bool = False) -> str:
        """The new text of a token.

        Args:
            token: its id.
            last: whether it is the last one, and the model stopped there.
        """
        if last and token in self._stop_tokens:
            return ""
        new = self._text.push(token)
        self.length += len(new)
        return self._stops.push(new)

    def flush(self) -> str:
        """The text that was held back; no token may follow."""
        new = self._text.flush()
        self.length += len(new)
        return self._stops.push(new) + self._stops.flush()
