import pytest
import torch

from spotune_serve.engine.base import EngineStats
from spotune_serve.engine.model import LoadedModel
from spotune_serve.engine.scheduler import Scheduler
from tests.serve.support.generating import Collected, request, sequence
from tests.serve.support.toy_models import generated_by_transformers, prompts, toy_model


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel(toy_model("llama"))


def submit(scheduler: Scheduler, model: LoadedModel, length: int, max_tokens: int) -> Collected:
    """Queue a sequence that runs to its maximum."""
    collected = Collected()
    waiting = sequence(model, request([5] * length, max_tokens), collected)
    waiting.stop_token_ids = frozenset()
    scheduler.submit(waiting)
    return collected


@torch.inference_mode()
def test_a_step_admits_one_sequence_and_extends_all(model: LoadedModel) -> None:
    scheduler = Scheduler(model, 8, 1000)
    found = [submit(scheduler, model, length, 9) for length in (3, 5, 7)]
    counts = []
    for _ in range(4):
        scheduler.step()
        counts.append([len(each.tokens) for each in found])
    assert counts == [[2, 0, 0], [3, 2, 0], [4, 3, 2], [5, 4, 3]]


@torch.inference_mode()
def test_waiting_sequences_are_admitted_in_order_when_a_place_is_free(model: LoadedModel) -> None:
    scheduler = Scheduler(model, 2, 1000)
    found = [submit(scheduler, model, 3, max_tokens) for max_tokens in (3, 9, 9, 9)]
    scheduler.step()
    scheduler.step()
    assert [bool(each.tokens) for each in found] == [True, True, False, False]
    assert scheduler.stats().running == 1, "the first is finished"
    scheduler.step()
    assert [bool(each.tokens) for each in found] == [True, True, True, False]


@torch.inference_mode()
def test_sequences_wait_while_the_cache_is_reserved(model: LoadedModel) -> None:
    scheduler = Scheduler(model, 8, 30)
    found = [submit(scheduler, model, 10, 5), submit(scheduler, model, 11, 5), submit(scheduler, model, 2, 3)]
    scheduler.step()
    scheduler.step()
    assert [bool(each.tokens) for each in found] == [True, False, False], "first come, first served"
    for _ in range(20):
        scheduler.step()
    assert [each.finish_reason for each in found] == ["length"] * 3
    assert not scheduler.has_work


@torch.inference_mode()
def test_short_sequence_decodes_apart_if_its_padding_would_not_fit(model: LoadedModel) -> None:
    scheduler = Scheduler(model, 8, 60)
    found = [submit(scheduler, model, 40, 9), submit(scheduler, model, 2, 5)]
    scheduler.step()
    scheduler.step()
    assert scheduler.stats() == EngineStats(running=2, waiting=0, cached_tokens=42 + 3)
    assert all(each.tokens for each in found)


@torch.inference_mode()
def test_stats_count_tokens_without_padding(model: LoadedModel) -> None:
    scheduler = Scheduler(model, 2, 1000)
    for length in (4, 9, 3):
        submit(scheduler, model, length, 9)
    assert scheduler.stats() == EngineStats(0, 3, 0)
    scheduler.step()
    assert scheduler.stats() == EngineStats(1, 2, 4 + 1)
    scheduler.step()
    assert scheduler.stats() == EngineStats(2, 1, 4 + 2 + 9 + 1)


@torch.inference_mode()
def test_encoder_tokens_count_as_cached() -> None:
    model = LoadedModel(toy_model("t5"))
    scheduler = Scheduler(model, 2, 1000)
    submit(scheduler, model, 7, 9)
    scheduler.step()
    assert scheduler.stats().cached_tokens == 7 + 2


@torch.inference_mode()
def test_aborted_sequences_leave_before_the_next_token(model: LoadedModel) -> None:
    scheduler = Scheduler(model, 2, 1000)
    asked = [sequence(model, request(prompt, 9), Collected()) for prompt in prompts(3)]
    for each in asked:
        scheduler.submit(each)
    scheduler.step()
    asked[0].aborted = asked[2].aborted = True
    before = len(asked[0].generated)
    scheduler.step()
    assert len(asked[0].generated) == before
    assert scheduler.stats().running == 1
    assert scheduler.stats().waiting == 0
    assert len(asked[1].generated) == 2


@torch.inference_mode()
def test_failed_prefill_ends_only_its_sequence(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(model, 4, 1000)
    running = submit(scheduler, model, 3, 6)
    scheduler.step()
    failed = submit(scheduler, model, 4, 6)
    with monkeypatch.context() as patch:
        patch.setattr(model, "prefill", lambda *_: 1 / 0)
        scheduler.step()
    for _ in range(6):
        scheduler.step()
    assert (running.finish_reason, running.errors) == ("length", [])
    assert "ZeroDivisionError" in str(failed.errors[0])
    assert isinstance(failed.errors[0].__cause__, ZeroDivisionError)


@torch.inference_mode()
def test_row_without_numbers_ends_only_its_sequence(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(model, 4, 1000)
    found = [submit(scheduler, model, 3, 6), submit(scheduler, model, 4, 6)]
    scheduler.step()
    scheduler.step()
    decode = model.decode

    def first_row_is_nan(*inputs: object) -> torch.Tensor:
        logits = decode(*inputs)  # type: ignore[arg-type]
        logits[0] = float("nan")
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(model, "decode", first_row_is_nan)
        scheduler.step()
    for _ in range(6):
        scheduler.step()
    assert "NaN" in str(found[0].errors[0])
    assert (found[1].finish_reason, found[1].errors) == ("length", [])


@torch.inference_mode()
def test_rows_without_position_ids_decode_only_with_rows_of_their_length() -> None:
    toy = toy_model("bart")
    model = LoadedModel(toy)
    assert not model.can_pad
    scheduler = Scheduler(model, 8, 1000)
    asked = prompts(5)
    found = [Collected() for _ in asked]
    for prompt, collected in zip(asked, found, strict=True):
        scheduler.submit(sequence(model, request(prompt, 12), collected))
    while scheduler.has_work:
        scheduler.step()
    assert [each.tokens for each in found] == [generated_by_transformers(toy, prompt, 12) for prompt in asked]
