from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spotune_serve.engine.base import (
    GeneratedToken,
    GenerationRequest,
    PromptTooLongError,
    SamplingParams,
    TokenLogprob,
    ToolCallFormat,
    UnknownAdapterError,
    UnsupportedFormatError,
    UnsupportedToolChoiceError,
)
from spotune_serve.engine.vllm_parameters import (
    GENERATED_TOKENS,
    VllmModel,
    VllmSettings,
    check_request,
    engine_arguments,
    finish_reason,
    generated_tokens,
    sampling_arguments,
)

EOS = 2
MODEL = VllmModel(100, 16, frozenset({EOS}), adapters=frozenset({"sql"}))


def request(
    prompt: tuple[int, ...] = (5, 6, 7), generated: tuple[int, ...] = (), adapter: str = "", **sampling: Any
) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 8, "seed": 11, **sampling})
    return GenerationRequest("a-request", prompt, params, generated, adapter)


def test_json_schemas_are_refused() -> None:
    with pytest.raises(UnsupportedFormatError, match="runs on vLLM"):
        check_request(request(json_schema='{"type": "object"}'), MODEL)


def test_forced_calls_of_tools_are_refused() -> None:
    with pytest.raises(UnsupportedToolChoiceError, match=r"runs on vLLM.*tool_choice: auto"):
        check_request(request(tool_calls=(ToolCallFormat("<tool_call>", '{"type": "object"}', "</tool_call>"),)), MODEL)


def test_every_sampling_parameter_reaches_vllm() -> None:
    asked = request(
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, presence_penalty=0.5, frequency_penalty=-0.25,
        logit_bias={9: -3.5}, logprobs=4, stop_token_ids=(8,),
    )  # fmt: skip
    assert sampling_arguments(asked, replace(MODEL, repetition_penalty=1.1)) == {
        "max_tokens": 8,
        "seed": 11,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
        "repetition_penalty": 1.1,
        "logit_bias": {9: -3.5},
        "logprobs": 4,
        "stop_token_ids": [EOS, 8],
        "ignore_eos": True,
        "detokenize": False,
        "extra_args": None,
    }


def test_ignored_end_of_text_is_no_stop_token() -> None:
    assert sampling_arguments(request(ignore_eos=True, stop_token_ids=(8,)), MODEL)["stop_token_ids"] == [8]


def test_continued_request_has_the_rest_of_its_tokens_and_names_the_generated_ones() -> None:
    arguments = sampling_arguments(request(generated=(3, 4, 5)), MODEL)
    assert arguments["max_tokens"] == 5
    assert arguments["extra_args"] == {GENERATED_TOKENS: 3}
    assert arguments["seed"] == 11


def test_sequence_ends_at_the_maximum_length_of_the_model() -> None:
    assert sampling_arguments(request(tuple(range(3, 13)), max_tokens=50), MODEL)["max_tokens"] == 6
    continued = request(tuple(range(3, 13)), generated=(4, 4), max_tokens=50)
    assert sampling_arguments(continued, MODEL)["max_tokens"] == 4


@pytest.mark.parametrize("seed", [0, -1, 2**63, -(2**70), 2**64 + 1])
def test_every_seed_fits_into_64_bits_and_is_not_minus_one(seed: int) -> None:
    """To vLLM, -1 means that there is no seed."""
    assert 0 <= sampling_arguments(request(seed=seed), MODEL)["seed"] < 2**63


def test_neighbouring_seeds_stay_different() -> None:
    seeds = [sampling_arguments(request(seed=seed), MODEL)["seed"] for seed in range(-50, 50)]
    assert len(set(seeds)) == 100


@pytest.mark.parametrize(
    ("generated", "sampling", "expected"),
    [
        ((), {}, None),
        ((3, 4), {}, None),
        ((3, EOS), {}, "stop"),
        ((3, EOS), {"ignore_eos": True}, None),
        ((3, 8), {"stop_token_ids": (8,)}, "stop"),
        ((3, 4), {"max_tokens": 2}, "length"),
        ((3, EOS), {"max_tokens": 2}, "stop"),
        ((3,) * 13, {"max_tokens": 50}, "length"),
    ],
)
def test_sequence_that_was_finished_elsewhere_is_recognized(
    generated: tuple[int, ...], sampling: dict[str, Any], expected: str | None
) -> None:
    assert finish_reason(request(generated=generated, **sampling), MODEL) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ],
)
def test_value_that_vllm_does_not_support_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        check_request(request(**{field: value}), replace(MODEL, vocabulary=2000))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 2.0, "top_p": 1.0, "min_p": 1.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "logprobs": 0},
        {"logprobs": 20, "logit_bias": dict.fromkeys(range(100), 100.0)},
    ],
)
def test_limits_themselves_are_accepted(sampling: dict[str, Any]) -> None:
    check_request(request(adapter="sql", **sampling), MODEL)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        (request(()), ValueError, "the prompt is empty"),
        (request((5, 100)), ValueError, "token id 100 is outside the vocabulary of 100 tokens"),
        (request(generated=(-1,)), ValueError, "token id -1"),
        (request(logit_bias={101: 1.0}), ValueError, "token id 101"),
        (request(adapter="other"), UnknownAdapterError, "no adapter 'other'; loaded: sql"),
        (request((3,) * 16), PromptTooLongError, "16 tokens and 0 were generated.*maximum is 16"),
        (request((3,) * 10, generated=(3,) * 7), PromptTooLongError, "10 tokens and 7 were generated"),
    ],
)
def test_impossible_request_is_refused(asked: GenerationRequest, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_request(asked, MODEL)


def test_tokens_without_log_probabilities() -> None:
    assert generated_tokens([4, 5], None, None) == (GeneratedToken(4), GeneratedToken(5))


def logprobs(*entries: tuple[int, int, float]) -> dict[int, Any]:
    return {token: SimpleNamespace(rank=rank, logprob=value) for token, rank, value in entries}


def test_likeliest_tokens_come_in_order_without_a_less_likely_chosen_one() -> None:
    found = [logprobs((7, 5, -4.0), (3, 1, -0.5), (4, 2, -1.5)), logprobs((4, 2, -1.5), (3, 1, -0.5))]
    top = (TokenLogprob(3, -0.5), TokenLogprob(4, -1.5))
    assert generated_tokens([7, 4], found, 2) == (GeneratedToken(7, -4.0, top), GeneratedToken(4, -1.5, top))


def test_log_probability_of_the_token_alone() -> None:
    assert generated_tokens([7], [logprobs((7, 1, -0.25))], 0) == (GeneratedToken(7, -0.25),)


def test_one_gpu_needs_no_process_for_each_gpu() -> None:
    arguments = engine_arguments(Path("/model"), VllmSettings(), {})
    assert (arguments["tensor_parallel_size"], arguments["distributed_executor_backend"]) == (1, "uni")
    arguments = engine_arguments(Path("/model"), VllmSettings(tensor_parallel_size=4), {})
    assert (arguments["tensor_parallel_size"], arguments["distributed_executor_backend"]) == (4, "mp")


def test_weights_come_from_safetensors_only_and_text_is_left_to_the_gateway() -> None:
    arguments = engine_arguments(Path("/model"), VllmSettings(), {})
    assert (arguments["model"], arguments["load_format"]) == ("/model", "safetensors")
    assert arguments["skip_tokenizer_init"]
    assert not any("lora" in name for name in arguments)


def test_batch_invariance_avoids_the_kernels_that_break_it() -> None:
    assert engine_arguments(Path("/model"), VllmSettings(), {})["attention_backend"] is None
    invariant = VllmSettings(batch_invariant=True)
    assert engine_arguments(Path("/model"), invariant, {})["attention_backend"] == "TRITON_ATTN"
    chosen = replace(invariant, attention_backend="FLEX_ATTENTION")
    assert engine_arguments(Path("/model"), chosen, {})["attention_backend"] == "FLEX_ATTENTION"


@pytest.mark.parametrize(("ranks", "rank"), [([4], 8), ([8], 8), ([9, 4], 16), ([300], 320), ([512, 1], 512)])
def test_adapters_get_the_smallest_rank_that_fits_all(ranks: list[int], rank: int) -> None:
    arguments = engine_arguments(Path("/model"), VllmSettings(), {str(number): r for number, r in enumerate(ranks)})
    assert arguments["enable_lora"]
    assert arguments["max_lora_rank"] == rank


def test_all_adapters_stay_in_memory() -> None:
    """An evicted one would be read from disk in the middle of a step."""
    arguments = engine_arguments(Path("/model"), VllmSettings(), {str(number): 8 for number in range(20)})
    assert (arguments["max_loras"], arguments["max_cpu_loras"]) == (8, 20)


@pytest.mark.parametrize(("gpus", "parallel", "fraction"), [(0.5, 1, 0.45), (1.0, 1, 0.9), (2.0, 2, 0.9)])
def test_replica_uses_its_share_of_the_gpus(gpus: float, parallel: int, fraction: float) -> None:
    settings = VllmSettings.for_gpus(gpus)
    assert settings.tensor_parallel_size == parallel
    assert settings.memory_fraction == pytest.approx(fraction)
    assert settings.max_batch_size == VllmSettings().max_batch_size
    assert VllmSettings.for_gpus(gpus, 7).max_batch_size == 7
