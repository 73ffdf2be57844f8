"""Answers that match a JSON schema, or call a tool: which tokens may follow, by llguidance.

The engine masks all other tokens before it chooses one. The state of a grammar is a function of the request and the
tokens so far. A replica that continues an answer rebuilds it, so a continued answer has the tokens of an undisturbed
one.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spotune_serve.engine.base import SamplingParams, UnsupportedFormatError, UnsupportedToolChoiceError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

_LAYOUT: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[ \t\n]{0,24}"}
"""White space between values is limited: a model could repeat it up to the end of its answer."""
_TAG = re.compile(r"(</?[\w-]+>)")


class AnswerGrammar:
    """Where one answer is in its grammar.

    Args:
        matcher: llguidance's state.
        vocabulary: number of token ids of the model.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    @property
    def is_complete(self) -> bool:
        """Whether the answer ends here: nothing may follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may follow [vocabulary]; end-of-text tokens are among them if the answer may end.

        Raises:
            ValueError: the grammar is too complex to be followed.
        """
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        self._check()
        allowed = np.zeros(self._vocabulary, dtype=np.bool_)
        allowed[: len(bits)] = bits[: self._vocabulary]
        return allowed

    def can_continue(self) -> bool:
        """Whether a token may follow. llguidance offers a token of unknown text if it has none for a forced text."""
        tokens = np.flatnonzero(self.allowed())
        return bool(len(tokens) > 1 or (len(tokens) == 1 and self._matcher.validate_tokens([int(tokens[0])])))

    def accept(self, token: int) -> None:
        """Go on after a token.

        Raises:
            ValueError: the token may not follow.
        """
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"the answer cannot follow its grammar: {_first_line(self._matcher)}")


def _first_line(matcher: LLMatcher) -> str:
    """The error of a matcher without the dump of its state."""
    return matcher.get_error().partition("\n")[0]


class Grammars:
    """Makes the grammars of one model. Its tokenizer is loaded for the first of them.

    Args:
        load_tokenizer: returns the model's tokenizer.
    """

    def __init__(self, load_tokenizer: Callable[[], PreTrainedTokenizerBase]) -> None:
        self._load_tokenizer = load_tokenizer
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._tags: frozenset[str] = frozenset()

    @classmethod
    def of(cls, directory: Path) -> Grammars:
        """The grammars of a model.

        Args:
            directory: the model's folder, with its tokenizer.
        """

        def load() -> Any:
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)

        return cls(load)

    def start(
        self, sampling: SamplingParams, generated: Sequence[int], vocabulary: int, eos_token_ids: Collection[int]
    ) -> AnswerGrammar:
        """The grammar of an answer, after the tokens that it already has. May take a second.

        Args:
            sampling: has a JSON schema of the answer's text, or tools that it calls.
            generated: tokens so far.
            vocabulary: number of token ids of the model.
            eos_token_ids: tokens that end an answer.

        Raises:
            UnsupportedFormatError: a schema is not supported, or the model's tokens cannot write such an answer.
            ValueError: the tokens so far do not match the grammar.
        """
        from llguidance import LLMatcher

        tokenizer = self._converted_tokenizer(vocabulary, eos_token_ids)
        matcher = LLMatcher(tokenizer, _grammar(sampling, self._tags), log_level=0)
        error, what = (
            (UnsupportedToolChoiceError, "call of a tool")
            if sampling.tool_calls
            else (UnsupportedFormatError, "JSON schema")
        )
        if matcher.is_error():
            raise error(f"the {what} cannot be enforced: {_first_line(matcher)}")
        grammar = AnswerGrammar(matcher, vocabulary)
        if not generated and not grammar.can_continue():
            raise error(f"the model's vocabulary has no tokens for the {what}")
        for token in generated:
            grammar.accept(token)
        return grammar

    def _converted_tokenizer(self, vocabulary: int, eos_token_ids: Collection[int]) -> LLTokenizer:
        """The tokenizer, whose end-of-text tokens are those of the model."""
        with self._lock:
            if self._tokenizer is None:
                tokenizer = self._load_tokenizer()
                try:
                    self._tokenizer = _convert(tokenizer, vocabulary, eos_token_ids)
                    self._tags = _tags(tokenizer)
                except (ValueError, AttributeError) as error:
                    raise UnsupportedFormatError(
                        f"the model's tokenizer, a {type(tokenizer).__name__}, cannot follow a JSON schema: {error}"
                    ) from error
            return self._tokenizer


def _grammar(sampling: SamplingParams, tags: Collection[str]) -> str:
    """The answer's grammar, as llguidance reads it.

    Args:
        sampling: has a JSON schema or tools.
        tags: see `_tags`.
    """
    from llguidance import LLMatcher

    if not sampling.tool_calls:
        return LLMatcher.grammar_from_json_schema(sampling.json_schema, overrides=_LAYOUT)
    rules = ['start: call ("\\n" call)*' if sampling.several_calls else "start: call"]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(sampling.tool_calls))))
    for number, call in enumerate(sampling.tool_calls):
        schema = json.dumps({**json.loads(call.arguments_schema), "x-guidance": _LAYOUT})
        prefix, suffix = _terminals(call.prefix, tags), _terminals(call.suffix, tags)
        rules.append(f"call_{number}: {prefix} arguments_{number} {suffix}")
        rules.append(f"arguments_{number}: %json {schema}")
    return LLMatcher.grammar_from_lark("\n".join(rules))


def _terminals(text: str, tags: Collection[str]) -> str:
    """A text as terminals of a grammar, in which a tag that is one token is that token, as the model was trained."""
    parts = (part for part in _TAG.split(text) if part)
    return " ".join(part if part in tags else json.dumps(part) for part in parts)


def _tags(tokenizer: Any) -> frozenset[str]:
    """The tags in the vocabulary that belong to an answer's text: `<tool_call>` is one token of Qwen models.

    llguidance takes added tokens of this form for special ones, which match no text.
    """
    added = tokenizer.added_tokens_decoder.values()
    return frozenset(token.content for token in added if not token.special and _TAG.fullmatch(token.content))


def _convert(tokenizer: Any, vocabulary: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    """A fast tokenizer of transformers as one of llguidance.

    Raises:
        ValueError: llguidance does not know the text of the tokens.
        AttributeError: it is no fast tokenizer.
    """
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer, decoders

    backend: Any = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    if isinstance(backend.decoder, decoders.Metaspace):  # T5's; llguidance knows it by its parts only
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    size = max(vocabulary, len(tokenizer))
    return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=sorted(eos_token_ids) or None)
