"""Answers of models with random weights match the JSON schema of their request, also after the loss of a replica."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from spotune_serve.engine.base import (
    GenerationError,
    GenerationRequest,
    SamplingParams,
    ToolCallFormat,
    UnsupportedFormatError,
    UnsupportedToolChoiceError,
)
from spotune_serve.engine.grammar import Grammars
from spotune_serve.engine.model import LoadedModel
from spotune_serve.engine.transformers_engine import TransformersEngine
from tests.serve.support.generating import Answer, answer, answers, request
from tests.serve.support.served_models import sentencepiece_tokenizer
from tests.serve.support.toy_models import EOS, toy_model
from tests.trainer.support.tiny import VOCABULARY, save_tokenizer

jsonschema: Any = pytest.importorskip("jsonschema")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "grün", "青"]}, "minItems": 1, "maxItems": 3},
        "married": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "married"],
    "additionalProperties": False,
}
POSITIONS = {"vocab_size": VOCABULARY, "max_position_embeddings": 512, "n_positions": 512}
PROMPT = tuple(range(40, 52))
WEATHER: dict[str, Any] = {
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Köln"]}},
}
CALLS = tuple(
    ToolCallFormat(f'<call>\n{{"name": "{name}", "arguments": ', json.dumps({"type": "object", **schema}), "}\n</call>")
    for name, schema in {"weather": WEATHER, "now": {"additionalProperties": False}}.items()
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def ask(
    model: PreTrainedModel, asked: Sequence[GenerationRequest], tokenizer: PreTrainedTokenizerBase | None
) -> list[Answer]:
    async def run() -> list[Answer]:
        grammars = None if tokenizer is None else Grammars(lambda: tokenizer)
        engine = TransformersEngine(LoadedModel(model), grammars=grammars)
        try:
            return await answers(engine, asked)
        finally:
            await engine.close()

    return asyncio.run(run())


def json_request(schema: Any = SCHEMA, **values: Any) -> GenerationRequest:
    return request(PROMPT, 400, json_schema=json.dumps(schema), **values)


def text_of(tokenizer: PreTrainedTokenizerBase, found: Answer) -> str:
    return str(tokenizer.decode(list(found.tokens), skip_special_tokens=True))


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_answers_match_their_schema(family: str, tokenizer: PreTrainedTokenizerBase) -> None:
    sampled = [json_request(temperature=1.5, seed=seed) for seed in range(6)]
    found = ask(toy_model(family, **POSITIONS), [json_request(), *sampled], tokenizer)
    assert {each.finish_reason for each in found} == {"stop"}
    values = [json.loads(text_of(tokenizer, each)) for each in found]
    for value in values:
        jsonschema.Draft202012Validator(SCHEMA).validate(value)
    assert len({str(value) for value in values}) > 3


def test_sequences_of_one_batch_have_their_own_schemas(tokenizer: PreTrainedTokenizerBase) -> None:
    model = toy_model("llama", **POSITIONS)
    plain = request(PROMPT, 30)
    number, word, free = ask(
        model, [json_request({"type": "integer", "maximum": 9, "minimum": 0}), json_request({"const": "yes"}), plain],
        tokenizer,
    )  # fmt: skip
    assert 0 <= json.loads(text_of(tokenizer, number)) <= 9
    assert json.loads(text_of(tokenizer, word)) == "yes"
    assert free == ask(model, [plain], tokenizer)[0]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 1.2])
def test_continued_answer_has_the_tokens_of_an_undisturbed_one(
    temperature: float, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = toy_model("llama", **POSITIONS)
    whole = ask(model, [json_request(temperature=temperature, seed=4)], tokenizer)[0]
    cuts = range(len(whole.tokens) + 1)
    continued = [json_request(temperature=temperature, seed=4, generated=whole.tokens[:cut]) for cut in cuts]
    found = ask(model, continued, tokenizer)
    assert [whole.tokens[:cut] + each.tokens for cut, each in zip(cuts, found, strict=True)] == [whole.tokens] * len(
        cuts
    )
    assert {each.finish_reason for each in found} == {"stop"}


def test_answer_ends_when_it_is_complete_even_without_end_of_text_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    found = ask(toy_model("llama", **POSITIONS), [json_request({"const": {"a": 1}}, ignore_eos=True)], tokenizer)[0]
    assert json.loads(text_of(tokenizer, found)) == {"a": 1}
    assert found.finish_reason == "stop"
    assert EOS not in found.tokens


def test_answer_may_be_cut_off_by_its_limit(tokenizer: PreTrainedTokenizerBase) -> None:
    asked = request(PROMPT, 3, json_schema=json.dumps(SCHEMA))
    assert ask(toy_model("llama", **POSITIONS), [asked], tokenizer)[0].finish_reason == "length"


def test_log_probabilities_are_those_of_the_unmasked_logits(tokenizer: PreTrainedTokenizerBase) -> None:
    model = toy_model("llama", **POSITIONS)
    free = ask(model, [request(PROMPT, 1, logprobs=2)], tokenizer)[0]
    masked = ask(model, [request(PROMPT, 1, logprobs=2, json_schema='{"type": "object"}')], tokenizer)[0]
    assert masked.generated[0].top == free.generated[0].top
    assert masked.generated[0].token != free.generated[0].token


def test_byte_tokens_write_characters_outside_the_vocabulary() -> None:
    tokenizer = sentencepiece_tokenizer()
    model = toy_model("llama", **{**POSITIONS, "vocab_size": len(tokenizer)})
    found = ask(model, [json_request({"enum": ["青", "grün"]})], tokenizer)[0]
    assert json.loads(text_of(tokenizer, found)) in {"青", "grün"}


def test_schema_that_the_vocabulary_cannot_write_is_refused() -> None:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -1.0), ("▁yes", -2.0), ('"', -3.0)]  # T5 has no braces either
    words = Tokenizer(models.Unigram(pieces, unk_id=0))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    with pytest.raises(UnsupportedFormatError, match="vocabulary has no tokens"):
        ask(toy_model("t5", **POSITIONS), [json_request()], tokenizer)


def test_tokenizer_without_text_is_refused() -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "yes": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    with pytest.raises(UnsupportedFormatError, match="the model's tokenizer"):
        ask(toy_model("llama", **POSITIONS), [json_request()], tokenizer)


def test_schema_that_cannot_be_enforced_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UnsupportedFormatError, match="uniqueItems"):
        ask(toy_model("llama", **POSITIONS), [json_request({"type": "array", "uniqueItems": True})], tokenizer)


def test_engine_without_a_tokenizer_refuses_schemas() -> None:
    with pytest.raises(UnsupportedFormatError, match="no tokenizer"):
        ask(toy_model("llama", **POSITIONS), [json_request()], None)


def test_contradiction_with_the_settings_of_the_model_fails(tokenizer: PreTrainedTokenizerBase) -> None:
    model = toy_model("llama", **POSITIONS)
    (brace,) = tokenizer("{", add_special_tokens=False)["input_ids"]
    model.generation_config.suppress_tokens = [brace]

    async def run() -> None:
        engine = TransformersEngine(LoadedModel(model), grammars=Grammars(lambda: tokenizer))
        try:
            await answer(engine, json_request())
        finally:
            await engine.close()

    with pytest.raises(GenerationError, match="every token that the answer's grammar allows"):
        asyncio.run(run())


def call_request(calls: tuple[ToolCallFormat, ...], **values: Any) -> GenerationRequest:
    return request(PROMPT, 400, temperature=30.0, tool_calls=calls, **values)


def called(text: str) -> list[dict[str, Any]]:
    """The calls of an answer, which has no other text; their arguments match the schemas of `CALLS`."""
    assert text.startswith("<call>\n")
    assert text.endswith("\n</call>")
    calls = [json.loads(part) for part in text.removeprefix("<call>").removesuffix("</call>").split("</call>\n<call>")]
    for call in calls:
        schema = {"weather": WEATHER, "now": {"maxProperties": 0}}[call["name"]]
        jsonschema.Draft202012Validator(schema).validate(call["arguments"])
    return calls


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_an_answer_is_one_valid_call_of_one_of_the_tools(family: str, tokenizer: PreTrainedTokenizerBase) -> None:
    asked = [call_request(CALLS, seed=seed) for seed in range(12)]
    found = ask(toy_model(family, **POSITIONS), asked, tokenizer)
    assert {each.finish_reason for each in found} == {"stop"}
    calls = [called(text_of(tokenizer, each)) for each in found]
    assert {len(each) for each in calls} == {1}
    assert {each[0]["name"] for each in calls} == {"weather", "now"}


def test_more_calls_may_follow_where_they_are_allowed(tokenizer: PreTrainedTokenizerBase) -> None:
    asked = [call_request(CALLS, seed=seed, several_calls=True) for seed in range(8)]
    found = ask(toy_model("llama", **POSITIONS), asked, tokenizer)
    complete = [each for each in found if each.finish_reason == "stop"]
    assert max(len(called(text_of(tokenizer, each))) for each in complete) > 1


def test_a_continued_call_has_the_tokens_of_an_undisturbed_one(tokenizer: PreTrainedTokenizerBase) -> None:
    model = toy_model("llama", **POSITIONS)
    (whole,) = ask(model, [call_request(CALLS[:1], seed=3)], tokenizer)
    cuts = range(0, len(whole.tokens) + 1, 5)
    continued = [call_request(CALLS[:1], seed=3, generated=whole.tokens[:cut]) for cut in cuts]
    for cut, each in zip(cuts, ask(model, continued, tokenizer), strict=True):
        assert whole.tokens[:cut] + each.tokens == whole.tokens


def test_a_tag_may_be_one_token_of_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.add_tokens(["<call>", "</call>"])
    (opening,) = tokenizer.encode("<call>", add_special_tokens=False)
    model = toy_model("llama", **{**POSITIONS, "vocab_size": len(tokenizer)})
    asked = [call_request(CALLS, several_calls=True, seed=seed) for seed in range(4)]
    for found in ask(model, asked, tokenizer):
        assert found.tokens[0] == opening
        called(text_of(tokenizer, found))


def test_a_vocabulary_without_the_text_of_a_call_is_refused() -> None:
    words = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("▁", -1.0), ("▁yes", -2.0)], unk_id=0))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    with pytest.raises(UnsupportedToolChoiceError, match="no tokens for the call of a tool"):
        ask(toy_model("t5", **POSITIONS), [call_request(CALLS)], tokenizer)


def test_tokenizer_is_read_from_the_folder_of_the_model(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    sampling = SamplingParams(max_tokens=9, seed=0, json_schema='{"const": "yes"}')
    grammar = Grammars.of(tmp_path).start(sampling, tokenizer('"yes"')["input_ids"], VOCABULARY, {EOS})
    assert grammar.is_complete
