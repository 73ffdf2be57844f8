"""Replicas that share weights, on processors: the holder is a real process, its memory an anonymous file."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from spotune.errors import InfrastructureError, JobError
from spotune_serve.engine.base import EngineLostError
from spotune_serve.engine.model import LoadedModel
from spotune_serve.engine.scheduler import Scheduler
from spotune_serve.engine.transformers_engine import TransformersEngine
from spotune_serve.engine.weights.load import load_adapters, load_model
from spotune_serve.engine.weights.shared import SharedWeights, holder_key, share_or_copy_weights, share_weights
from tests.serve.support.generating import Collected, answer, ask, request, sequence
from tests.serve.support.toy_models import prompts, toy_model

CPU = torch.device("cpu")


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A short path: the names of Unix sockets have at most 108 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    toy_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def start(folder: Path, sockets: Path, linger_seconds: float = 60) -> tuple[PreTrainedModel, SharedWeights]:
    """A replica's model and its connection. Holders end with the connections of a test, or after the given time."""
    model = load_model(folder)
    module: torch.nn.Module = model
    return model, share_weights(module, folder, CPU, sockets=sockets, linger_seconds=linger_seconds)


def wait_for_end(process: int) -> None:
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return
    with os.fdopen(descriptor, "rb") as file:
        assert select.select([file], [], [], 60)[0], "the holder is still there"


def kill(process: int) -> None:
    descriptor = os.pidfd_open(process)
    os.kill(process, signal.SIGKILL)
    with os.fdopen(descriptor, "rb") as file:
        select.select([file], [], [], 60)


def first_weight(model: PreTrainedModel) -> torch.Tensor:
    return next(model.parameters())


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(family, marks=pytest.mark.long) for family in ("gpt2", "t5"))]
)
def test_shared_weights_answer_as_own_ones(family: str, sockets: Path, tmp_path: Path) -> None:
    toy_model(family).save_pretrained(tmp_path)
    model, shared = start(tmp_path, sockets)
    asked = [request(prompt) for prompt in prompts(3)]
    assert ask(model, asked) == ask(load_model(tmp_path), asked)
    kill(shared.holder)


def test_two_replicas_use_the_same_memory(folder: Path, sockets: Path) -> None:
    (one, first), (other, second) = start(folder, sockets), start(folder, sockets)
    assert first.holder == second.holder
    with torch.no_grad():
        first_weight(one)[0, 0] = 123.0
    assert first_weight(other)[0, 0] == 123.0
    assert one.get_input_embeddings().weight is one.get_output_embeddings().weight
    kill(first.holder)


@pytest.mark.long
def test_replicas_that_start_at_once_start_one_holder(folder: Path, sockets: Path) -> None:
    models: list[torch.nn.Module] = [load_model(folder) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        shares = list(threads.map(lambda model: share_weights(model, folder, CPU, sockets=sockets), models))
    assert len({shared.holder for shared in shares}) == 1
    kill(shares[0].holder)


@pytest.mark.long
def test_memory_that_was_written_to_is_refused(folder: Path, sockets: Path) -> None:
    model, shared = start(folder, sockets)
    with torch.no_grad():
        first_weight(model)[0, 0] += 1
    with pytest.raises(JobError, match="other weights than the replicas that run"):
        start(folder, sockets)
    kill(shared.holder)


@pytest.mark.long
def test_holder_outlives_the_replica_that_started_it(folder: Path, sockets: Path) -> None:
    program = (
        "import sys, torch; from pathlib import Path; from spotune_serve.engine.weights.load import load_model\n"
        "from spotune_serve.engine.weights.shared import share_weights\n"
        "folder, sockets = map(Path, sys.argv[1:])\n"
        "shared = share_weights(load_model(folder), folder, torch.device('cpu'), sockets=sockets)\n"
        "print(shared.holder, flush=True); input()"
    )
    replica = subprocess.Popen(
        [sys.executable, "-c", program, str(folder), str(sockets)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert replica.stdout is not None
    holder = int(replica.stdout.readline())
    model, shared = start(folder, sockets)
    assert shared.holder == holder
    expected = ask(load_model(folder), [request((5, 6, 7))])
    assert ask(model, [request((5, 6, 7))]) == expected
    replica.kill()
    replica.communicate()
    assert ask(model, [request((5, 6, 7))]) == expected
    shared.check()
    kill(holder)


@pytest.mark.long
def test_holder_ends_when_the_last_replica_has_left(folder: Path, sockets: Path) -> None:
    (_, first), (_, second) = start(folder, sockets, linger_seconds=0.2), start(folder, sockets)
    first.close()
    second.check()
    second.close()
    wait_for_end(first.holder)
    assert list(sockets.glob("*.socket")) == []


@pytest.mark.long
def test_sequences_and_health_check_fail_when_the_holder_dies(folder: Path, sockets: Path) -> None:
    model, shared = start(folder, sockets)
    loaded, got = load_adapters(model, {}), Collected()
    scheduler = Scheduler(loaded, 4, 1000, shared.check)
    scheduler.submit(sequence(loaded, request((5, 6, 7), 50, ignore_eos=True), got))
    scheduler.step()
    tokens = got.tokens
    assert tokens
    kill(shared.holder)
    scheduler.step()
    assert got.tokens == tokens
    assert [type(error) for error in got.errors] == [EngineLostError]

    async def run() -> None:
        engine = TransformersEngine(loaded, check_weights=shared.check)
        with pytest.raises(EngineLostError, match="has ended"):
            engine.check_health()
        with pytest.raises(EngineLostError, match="has ended"):
            await answer(engine, request((5, 6, 7)))
        await engine.close()

    asyncio.run(run())


@pytest.mark.long
def test_next_replica_starts_a_new_holder_after_a_death(folder: Path, sockets: Path) -> None:
    _, lost = start(folder, sockets)
    kill(lost.holder)
    model, shared = start(folder, sockets)
    assert shared.holder != lost.holder
    shared.check()
    assert ask(LoadedModel(model), [request((5, 6, 7))]) == ask(load_model(folder), [request((5, 6, 7))])
    kill(shared.holder)


def test_changed_files_get_a_holder_of_their_own(folder: Path) -> None:
    before = holder_key(folder, CPU)
    weights = folder / "model.safetensors"
    assert holder_key(folder, CPU) == before
    os.utime(weights, ns=(1, 1))
    assert holder_key(folder, CPU) != before


@pytest.mark.long
def test_model_that_cannot_be_loaded_is_named(folder: Path, sockets: Path) -> None:
    module: torch.nn.Module = load_model(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(JobError, match=f"the model in {folder} cannot be loaded"):
        share_weights(module, folder, CPU, sockets=sockets)


def test_folder_that_others_can_write_to_is_refused(folder: Path, sockets: Path) -> None:
    sockets.chmod(0o777)
    with pytest.raises(InfrastructureError, match="only this user"):
        start(folder, sockets)


def test_replica_loads_a_copy_where_weights_cannot_be_shared(folder: Path, sockets: Path) -> None:
    sockets.chmod(0o777)
    model = load_model(folder)
    module: torch.nn.Module = model
    share_or_copy_weights(module, folder, CPU, sockets)()
    assert ask(model, [request((5, 6, 7))]) == ask(load_model(folder), [request((5, 6, 7))])
    assert list(sockets.iterdir()) == []
