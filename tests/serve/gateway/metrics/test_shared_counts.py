"""Gateway processes that share a port report the sums of what all of them count, also of those that were killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from spotune_serve.gateway.metrics.gateway_metrics import GatewayMetrics
from spotune_serve.gateway.metrics.shared_counts import CountFolder, Counts
from spotune_serve.gateway.sequence_timer import SequenceTimer

WAITING, RUNNING = "vllm:num_requests_waiting", "vllm:num_requests_running"
TOKENS, FIRST_TOKENS = "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count"
ANOTHER_PROCESS = """
import sys
from pathlib import Path
from spotune_serve.gateway.metrics.gateway_metrics import GatewayMetrics
from spotune_serve.gateway.sequence_timer import SequenceTimer

metrics = GatewayMetrics("tiny", folder=Path(sys.argv[1])).of("1")
SequenceTimer(metrics).add_tokens(5)
waiting = SequenceTimer(metrics)
metrics.requests.inc()
print("counted", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with one sequence of 5 tokens that runs, one that waits, and one finished request."""
    command = [sys.executable, "-c", ANOTHER_PROCESS, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "counted\n"
        try:
            yield process
        finally:
            process.kill()


def samples(metrics: GatewayMetrics, version: str = "1") -> dict[str, float]:
    """All samples of a version, except those of buckets."""
    families = text_string_to_metric_families(metrics.exposition().decode())
    found = [sample for family in families for sample in family.samples if "le" not in sample.labels]
    return {
        sample.name + sample.labels.get("finished_reason", ""): sample.value
        for sample in found
        if sample.labels["model_version"] == version
    }


def test_metrics_are_the_sums_over_all_processes(tmp_path: Path) -> None:
    first, second = (GatewayMetrics("tiny", folder=tmp_path / "counts") for _ in range(2))
    timers = [SequenceTimer(metrics.of("1")) for metrics in (first, second, second)]
    for timer in timers:
        timer.add_tokens(3)
    for timer in timers[:2]:
        timer.finish("stop")
    for metrics in (first, second):
        found = samples(metrics)
        assert (found[TOKENS], found[FIRST_TOKENS]) == (9, 3)
        assert (found[RUNNING], found[WAITING]) == (1, 0)
        assert (found["vllm:request_success_totalstop"], found["vllm:request_success_totalabort"]) == (2, 0)
        assert metrics.process == "counts"


def test_a_histogram_is_the_sum_over_all_processes(tmp_path: Path) -> None:
    first, second = (GatewayMetrics("tiny", folder=tmp_path).of("1") for _ in range(2))
    first.first_token_seconds.observe(0.05)
    second.first_token_seconds.observe(0.06)
    second.first_token_seconds.observe(100)
    for metrics in (first, second):
        found = metrics.totals().histogram("vllm:time_to_first_token_seconds")
        assert found.sum == pytest.approx(100.11)
        buckets = dict(found.buckets)
        assert [buckets[bound] for bound in ("0.04", "0.06", "80.0", "+Inf")] == [0, 2, 2, 3]


def test_a_killed_process_leaves_what_it_counted_and_nothing_that_runs(tmp_path: Path) -> None:
    metrics = GatewayMetrics("tiny", folder=tmp_path)
    metrics.of("1").generated_tokens.inc(2)
    with another_process(tmp_path) as other:
        found = samples(metrics)
        assert (found[TOKENS], found[RUNNING], found[WAITING]) == (7, 1, 1)
        other.kill()
        other.wait()
        found = samples(metrics)
    assert (found[TOKENS], found[FIRST_TOKENS], found["spotune:requests_total"]) == (7, 1, 1)
    assert (found[RUNNING], found[WAITING], metrics.of("1").waiting_now) == (0, 0, 0)


def test_a_process_that_starts_later_reports_the_dead_ones_too(tmp_path: Path) -> None:
    with another_process(tmp_path) as other:
        other.kill()
        other.wait()
    metrics = GatewayMetrics("tiny", folder=tmp_path)
    metrics.of("1")
    found = samples(metrics)
    assert (found[TOKENS], found[RUNNING], found[WAITING]) == (5, 0, 0)


def test_the_limit_of_waiting_requests_is_that_of_all_processes(tmp_path: Path) -> None:
    now = 0.0
    folders = [CountFolder(tmp_path) for _ in range(3)]
    asking, *others = (Counts(1, 1, folder, "1", lambda: now) for folder in folders)
    others[0].own[0] = 3
    assert asking.gauge(0) == 3
    others[0].own[0] = 4
    assert asking.gauge(0) == 4, "files are listed once a second, and numbers are always read"
    started = Counts(1, 1, CountFolder(tmp_path), "1")
    started.own[0] = 10
    assert asking.gauge(0) == 4
    now = 1.0
    assert asking.gauge(0) == 14


def test_versions_are_counted_apart_and_a_dropped_one_begins_at_zero(tmp_path: Path) -> None:
    metrics = GatewayMetrics("tiny", folder=tmp_path)
    for version, tokens in (("1", 2), ("model/with*[odd] name", 3)):
        metrics.of(version).generated_tokens.inc(tokens)
    assert samples(metrics, "model/with*[odd] name")[TOKENS] == 3
    metrics.drop("1")
    assert samples(metrics) == {}
    metrics.of("1")
    assert samples(metrics)[TOKENS] == 0
