import subprocess
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spotune_serve.engine.vllm_parameters import GENERATED_TOKENS, WORKER_EXTENSION
from spotune_serve.engine.vllm_worker import WorkerExtension, count_generated_tokens, on_exit_of


class Sampler:
    """The method of vLLM's sampler that is changed, and what it reads."""

    def __init__(self) -> None:
        self.req_states = SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([9, 9, 9])))
        self.added: list[tuple[int, int]] = []

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        self.added.append((req_idx, prompt_len))


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Sampler:
    monkeypatch.setattr(Sampler, "add_request", Sampler.add_request)
    count_generated_tokens(Sampler)
    count_generated_tokens(Sampler)
    return Sampler()


def test_tokens_of_earlier_replicas_are_no_part_of_the_prompt(sampler: Sampler) -> None:
    sampler.add_request(1, 9, SimpleNamespace(extra_args={GENERATED_TOKENS: 4}))
    assert sampler.added == [(1, 5)]
    assert sampler.req_states.prompt_len.np.tolist() == [9, 5, 9]


@pytest.mark.parametrize("extra", [None, {}, {"other": 3}])
def test_new_sequence_keeps_its_prompt(sampler: Sampler, extra: dict[str, int] | None) -> None:
    sampler.add_request(2, 9, SimpleNamespace(extra_args=extra))
    assert sampler.added == [(2, 9)]
    assert sampler.req_states.prompt_len.np.tolist() == [9, 9, 9]


def test_action_follows_the_exit_of_a_process() -> None:
    called = threading.Event()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        on_exit_of(process.pid, called.set)
        assert not called.is_set()
        process.kill()
        assert called.wait(60)


def test_action_follows_at_once_if_the_process_has_gone() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    called = threading.Event()
    on_exit_of(process.pid, called.set)
    assert called.is_set()


def test_vllm_finds_the_extension_by_its_name() -> None:
    module, _, name = WORKER_EXTENSION.rpartition(".")
    assert (module, name) == (WorkerExtension.__module__, WorkerExtension.__name__)
    public = [attribute for attribute in dir(WorkerExtension) if not attribute.startswith("__")]
    assert public == [], "vLLM refuses attributes that its worker may have, too"
