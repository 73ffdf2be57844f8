"""`spotune serve` on a real Ray Serve: answers, lost replicas, and its end."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from openai import OpenAI

from spotune_trainer.export.predict import Predictor
from tests.serve.support.exported import export_tiny_model
from tests.serve.support.live_service import LiveService
from tests.serve.support.openai_streams import PROMPTS, assert_streams_survive, metric, stream, undisturbed_streams

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", params=["seq2seq", pytest.param("causal", marks=pytest.mark.long)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def service(model: Path) -> Iterator[LiveService]:
    with LiveService(model, "--replicas", "2") as started:
        yield started


@pytest.fixture(scope="module")
def client(service: LiveService) -> Iterator[OpenAI]:
    with OpenAI(base_url=service.ready["openaiBaseUrl"], api_key="none", max_retries=0) as connected:
        yield connected


def running_sequences(client: OpenAI) -> float:
    return metric(client, "vllm:num_requests_running")


def test_predictions_equal_those_of_spotune_predict(client: OpenAI, model: Path) -> None:
    predictor = Predictor.load(model)
    expected = [answer.answer for answer in predictor.answer(PROMPTS)]
    response = client.post("/predict", body={"rows": [{"question": prompt} for prompt in PROMPTS]}, cast_to=object)
    assert isinstance(response, dict)
    assert [prediction["answer"] for prediction in response["predictions"]] == expected


def test_answers_match_their_json_schema(service: LiveService, client: OpenAI) -> None:
    schema = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 3}
    response_format = {"type": "json_schema", "json_schema": {"name": "colours", "schema": schema}}
    answer = client.completions.create(
        model=str(service.ready["model"]), prompt=PROMPTS[0], max_tokens=200, seed=3, n=4,
        extra_body={"response_format": response_format},
    )  # fmt: skip
    for choice in answer.choices:
        colours = json.loads(choice.text)
        assert 2 <= len(colours) <= 3
        assert set(colours) <= {"red", "green"}


def test_streams_survive_the_loss_of_their_replica(service: LiveService, client: OpenAI) -> None:
    name = str(service.ready["model"])
    undisturbed = undisturbed_streams(client, name)

    def choose_a_replica() -> Callable[[], None]:
        service.wait_for_states(RUNNING=2)
        return partial(os.kill, service.replicas()[0], signal.SIGKILL)

    assert_streams_survive(client, name, undisturbed, choose_a_replica)


def test_stats_count_a_replica_as_running_once_it_has_loaded_its_model(service: LiveService) -> None:
    service.wait_for_replicas(
        2
    )  # Ray Serve still counts the replica of the last test as running, if it was just killed
    service.wait_for_states(RUNNING=2)
    service.kill_replica()
    deadline = time.monotonic() + 120
    seen: list[tuple[int, dict[str, int]]] = []
    while len(seen) < 2 or seen[-1] != (2, {"RUNNING": 2}):
        assert time.monotonic() < deadline, seen
        now = len(service.replicas()), service.states()
        seen += [now] if not seen or now != seen[-1] else []
        time.sleep(0.1)
    assert (2, {"RUNNING": 1, "STARTING": 1}) in seen, "its process runs and loads the model"
    while (stats := service.stats())["replicas"] is None:
        assert time.monotonic() < deadline, "the gateway does not know of replicas"
    assert (len(stats["replicaAddresses"]), stats["unplacedSeconds"]) == (1, 0), "all are on this machine"


def test_a_client_that_leaves_ends_its_sequence(service: LiveService, client: OpenAI) -> None:
    name = str(service.ready["model"])
    endless = client.completions.create(
        model=name, prompt="how", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(endless))
    assert running_sequences(client) == 1.0
    endless.close()
    deadline = time.monotonic() + 60
    while running_sequences(client):
        assert time.monotonic() < deadline, "the sequence still runs after its client has left"
        time.sleep(0.2)


def test_running_requests_finish_at_a_stop(service: LiveService, client: OpenAI) -> None:
    """The last test of the service: it ends."""
    name = str(service.ready["model"])
    expected = stream(client, name, 1)
    processes = service.processes()
    begun = threading.Barrier(2)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(stream, client, name, 1, begun)
        begun.wait(timeout=120)
        service.signal(signal.SIGINT)
        assert running.result() == expected
    code, errors = service.wait()
    assert (code, errors) == (0, "")
    assert processes
    deadline = time.monotonic() + 60
    while left := [pid for pid in processes if Path(f"/proc/{pid}").exists()]:  # killed ones may take a moment to end
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.long
def test_a_broken_weight_file_is_named(tmp_path: Path) -> None:
    export_tiny_model(tmp_path, "causal")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(AssertionError, match=f"the model in {tmp_path} cannot be loaded"):
        LiveService(tmp_path)
