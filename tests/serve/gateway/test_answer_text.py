"""Text of an answer: equal to decoding all tokens at once, whole characters, stop strings cut off."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from spotune_serve.gateway.answer_text import AnswerText, IncrementalDecoder, StopStrings, TokenDecoder
from tests.serve.support.served_models import sentencepiece_tokenizer
from tests.trainer.support.tiny import save_tokenizer

NAMES = ["byte-level BPE", "SentencePiece"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedTokenizerBase]:
    folder = tmp_path_factory.mktemp("tokenizer")
    return dict(zip(NAMES, [save_tokenizer(folder), sentencepiece_tokenizer()], strict=True))


def decode_in_steps(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    decoder = IncrementalDecoder(TokenDecoder(tokenizer))
    return [*(decoder.push(token) for token in tokens), decoder.flush()]


def decode_at_once(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_any_tokens_decode_as_all_at_once(
    tokenizers: dict[str, PreTrainedTokenizerBase], name: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[name]
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=200))
    assert "".join(decode_in_steps(tokenizer, tokens)) == decode_at_once(tokenizer, tokens)


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(alphabet="ab .é€😀\n the", max_size=120))
def test_a_text_arrives_in_whole_characters(
    tokenizers: dict[str, PreTrainedTokenizerBase], name: str, text: str
) -> None:
    tokenizer = tokenizers[name]
    tokens = tokenizer(text)["input_ids"]
    steps = decode_in_steps(tokenizer, tokens)
    assert "".join(steps) == decode_at_once(tokenizer, tokens)
    assert not any("\ufffd" in step for step in steps)


@pytest.mark.parametrize("name", NAMES)
def test_long_answers_are_decoded_in_a_window(tokenizers: dict[str, PreTrainedTokenizerBase], name: str) -> None:
    tokenizer = tokenizers[name]
    tokens = tokenizer("there a b. é " * 300)["input_ids"]
    lengths = []

    class CountingDecoder(TokenDecoder):
        def decode(self, tokens: object) -> str:
            lengths.append(len(tokens))  # type: ignore[arg-type]  # a list of tokens
            return super().decode(tokens)  # type: ignore[arg-type]

    decoder = IncrementalDecoder(CountingDecoder(tokenizer))
    text = "".join(map(decoder.push, tokens)) + decoder.flush()
    assert text == decode_at_once(tokenizer, tokens)
    assert len(tokens) > 1000
    assert max(lengths) < 100


def first_complete_stop(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first; of several, the longest."""
    for length in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:length].endswith(stop)]
        if found:
            return text[: length - max(map(len, found))]
    return text


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4),
)
def test_stop_strings_cut_the_text_wherever_the_pieces_are_divided(pieces: list[str], stops: list[str]) -> None:
    cutter = StopStrings(stops)
    text = "".join(map(cutter.push, pieces)) + cutter.flush()
    assert text == first_complete_stop("".join(pieces), stops)


def test_the_start_of_a_stop_string_is_held_back() -> None:
    cutter = StopStrings(["</sql>"])
    assert [cutter.push(piece) for piece in ["SELECT 1<", "/sq", "x</s", "ql> more"]] == ["SELECT 1", "", "</sqx", ""]
    assert cutter.found


def test_an_end_token_is_no_text_even_if_it_is_not_special(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    token = tokenizer("SELECT")["input_ids"][0]
    decoder = TokenDecoder(tokenizer)
    assert AnswerText(decoder, (), {token}).push(token, last=True) == ""
    assert AnswerText(decoder, (), {token}).push(token) != ""
