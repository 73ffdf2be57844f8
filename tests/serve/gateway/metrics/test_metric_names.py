"""Metrics have the names of vLLM, and the reference lists all of them."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from spotune_serve.gateway.metrics.gateway_metrics import GatewayMetrics
from tests import ROOT

VLLM = {
    ("vllm:num_requests_running", "gauge"),
    ("vllm:num_requests_waiting", "gauge"),
    ("vllm:prompt_tokens", "counter"),
    ("vllm:generation_tokens", "counter"),
    ("vllm:request_success", "counter"),
    ("vllm:request_prompt_tokens", "histogram"),
    ("vllm:request_generation_tokens", "histogram"),
    ("vllm:time_to_first_token_seconds", "histogram"),
    ("vllm:inter_token_latency_seconds", "histogram"),
    ("vllm:request_time_per_output_token_seconds", "histogram"),
    ("vllm:e2e_request_latency_seconds", "histogram"),
}
"""Of those in vllm/v1/metrics/loggers.py of vLLM 0.24.0, what a gateway can count."""


def exposed() -> set[tuple[str, str]]:
    metrics = GatewayMetrics("tiny")
    metrics.of("1")
    return {(family.name, family.type) for family in text_string_to_metric_families(metrics.exposition().decode())}


def test_metrics_have_the_names_and_types_of_vllm() -> None:
    assert {(name, kind) for name, kind in exposed() if not name.startswith("spotune:")} == VLLM


def test_the_reference_lists_every_metric() -> None:
    section = (ROOT / "docs/reference/http-api.md").read_text().split("\n## /metrics\n")[1].split("\n## ")[0]
    listed = set(re.findall(r"^\| `(\S+)` \| (\w+) \|", section, re.MULTILINE))
    assert listed == {(f"{name}_total" if kind == "counter" else name, kind) for name, kind in exposed()}
