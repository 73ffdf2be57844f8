"""`spotune serve` on a real Ray Serve: answers, lost replicas, and its end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI

from spotune_trainer.export.predict import Predictor
from tests.serve.support.exported import export_tiny_model
from tests.serve.support.live_service import LiveService

pytestmark = pytest.mark.ray

TOKENS = 192
STREAMS = 24
MAX_KILLS = 5
PROMPTS = [f"how many singers {number} ?" for number in range(STREAMS)]


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


def stream(client: OpenAI, model: str, number: int, begun: threading.Barrier | None = None) -> str:
    """The text of one streamed answer: greedy for even numbers, sampled with a seed for odd ones."""
    chunks = client.completions.create(
        model=model,
        prompt=PROMPTS[number],
        max_tokens=TOKENS,
        temperature=number % 2,
        seed=number,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text = ""
    for chunk in chunks:
        text += "".join(choice.text for choice in chunk.choices)
        if begun is not None and text:
            begun.wait(timeout=120)
            begun = None
    return text


def metric(client: OpenAI, name: str) -> float:
    """The sum of a metric over its labels."""
    page = client.get("/../metrics", cast_to=str)
    samples = [line.rpartition(" ")[2] for line in page.splitlines() if line.startswith(f"{name}{{")]
    assert samples
    return sum(map(float, samples))


def running_sequences(client: OpenAI) -> float:
    return metric(client, "vllm:num_requests_running")


def test_predictions_equal_those_of_spotune_predict(client: OpenAI, model: Path) -> None:
    predictor = Predictor.load(model)
    expected = [answer.answer for answer in predictor.answer(PROMPTS)]
    response = client.post("/predict", body={"rows": [{"question": prompt} for prompt in PROMPTS]}, cast_to=object)
    assert isinstance(response, dict)
    assert [prediction["answer"] for prediction in response["predictions"]] == expected


def test_streams_survive_the_loss_of_their_replica(service: LiveService, client: OpenAI) -> None:
    name = str(service.ready["model"])
    with ThreadPoolExecutor(STREAMS) as threads:
        undisturbed = list(threads.map(lambda number: stream(client, name, number), range(STREAMS)))
    assert len(set(undisturbed)) > STREAMS / 2  # the texts vary, so a mixed-up stream would be noticed
    for _ in range(MAX_KILLS):  # on a busy machine, all streams may have ended just before the kill
        service.wait_for_replicas(2)
        begun = threading.Barrier(STREAMS + 1)
        with ThreadPoolExecutor(STREAMS) as threads:
            streams = [threads.submit(stream, client, name, number, begun) for number in range(STREAMS)]
            begun.wait(timeout=120)
            service.kill_replica()
            assert [running.result() for running in streams] == undisturbed
        if metric(client, "spotune:stream_resumptions_total"):
            return
    pytest.fail(f"none of {MAX_KILLS} killed replicas had a running stream")


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
    assert [pid for pid in processes if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.long
def test_a_broken_weight_file_is_named(tmp_path: Path) -> None:
    export_tiny_model(tmp_path, "causal")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(AssertionError, match=f"the model in {tmp_path} cannot be loaded"):
        LiveService(tmp_path)
