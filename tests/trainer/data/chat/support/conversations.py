"""The conversations of the reference, and tokenizers for its templates."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

GOLDEN = Path(__file__).parent.parent / "golden"
BOS = "<s>"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "The city."}},
                "required": ["city"],
            },
        },
    }
]
_CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [user("How many?"), assistant("Ten.")],
    "multi": [
        user("How many?"),
        assistant("Ten."),
        user("Why?"),
        assistant("Because."),
        user("Sure?"),
        assistant("Yes."),
    ],
    "system": [
        {"role": "system", "content": "Be brief."},
        user("How many?"),
        assistant("Ten."),
        user("Why?"),
        assistant("Because."),
    ],
    "tools": [
        user("Weather?"),
        assistant(None, tool_calls=[_CALL]),
        {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi", "name": "get_weather"},
        assistant("Sunny."),
        user("Thanks."),
        assistant("Welcome."),
    ],
    "thinking": [
        user("How many?"),
        assistant("Ten.", reasoning_content="I count."),
        user("Why?"),
        assistant("Because.", reasoning_content="I think."),
    ],
}


def conversation_row(name: str) -> dict[str, Any]:
    """A row with the messages in the column ``chat``, and the tools, if there are any, in ``tools``."""
    return {"chat": CONVERSATIONS[name], "tools": TOOLS if name == "tools" else None}


@cache
def _byte_level() -> str:
    """A byte-level tokenizer without merges, as JSON."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=257, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator(["x"], trainer)
    return backend.to_str()


@cache
def tokenizer_with(template: str, special: str, eos: str, added: str = "") -> PreTrainedTokenizerBase:
    """A byte-level tokenizer with a chat template of ``golden``.

    Args:
        template: Its path in ``golden``, without the suffix.
        special: Special tokens, separated by spaces.
        eos: The end-of-text token.
        added: Tokens that are not special, separated by spaces.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_byte_level()),
        bos_token=BOS,
        eos_token=eos,
        pad_token="<pad>",
        additional_special_tokens=[token for token in special.split() if token not in (BOS, eos)],
        chat_template=(GOLDEN / f"{template}.jinja").read_text(encoding="utf-8"),
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added.split()])
    tokenizer.name_or_path = template
    return tokenizer
