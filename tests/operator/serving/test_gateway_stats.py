"""Histograms and the lenient parser of `/stats`."""

from __future__ import annotations

from typing import Any

import pytest

from spotune_operator.serving.gateway_stats import GatewayStats, Histogram, Traffic, VersionCounters, parse_stats

INF = float("inf")


@pytest.mark.parametrize(
    ("buckets", "median"),
    [
        ({}, None),
        ({0.1: 0, INF: 0}, None),
        ({0.1: 10, 0.2: 10, INF: 10}, 0.05),
        ({0.1: 0, 0.2: 10, INF: 10}, 0.15),
        ({0.1: 4, 0.2: 6, 0.4: 10, INF: 10}, 0.15),
        ({0.1: 0, INF: 10}, 0.1),
    ],
)
def test_the_median_is_interpolated_within_its_bucket(buckets: dict[float, float], median: float | None) -> None:
    assert Histogram(buckets).median() == (pytest.approx(median) if median is not None else None)


@pytest.mark.parametrize(("limit", "fraction"), [(0.05, 0.75), (0.1, 0.5), (0.3, 0.25), (9.0, 0.0)])
def test_the_fraction_above_a_limit_is_interpolated_within_its_bucket(limit: float, fraction: float) -> None:
    assert Histogram({0.1: 5, 0.2: 5, 0.4: 10, INF: 10}).fraction_above(limit) == pytest.approx(fraction)


def test_counters_of_gateways_add_up_and_those_of_two_times_are_subtracted() -> None:
    first = VersionCounters(5, 1, Histogram({0.1: 4, INF: 5}))
    second = VersionCounters(7, 1, Histogram({0.1: 5, INF: 7}))
    total = first.plus(second)
    assert (total.requests, total.errors, total.first_token.count) == (12, 2, 12)
    assert total.plus(second, -1) == first.plus(VersionCounters())


def test_a_response_is_read_with_all_its_counters() -> None:
    buckets = {"0.001": 0, "0.1": 3, "+Inf": 4}
    version = {
        "weight": 90,
        "error": "",
        "running": 3,
        "requests": 1234,
        "errors": 2,
        "firstTokenSeconds": {"count": 4, "sum": 1.5, "buckets": buckets},
        "tokenSeconds": {"count": 4, "sum": 1.5, "buckets": buckets},
    }
    stats = parse_stats({"process": "a", "error": "no list", "versions": {"v1": version}})
    found = stats.versions["v1"]
    assert (stats.process, stats.error) == ("a", "no list")
    assert (found.weight, found.running, found.counters.requests, found.counters.errors) == (90, 3, 1234, 2)
    assert found.counters.first_token == found.counters.token == Histogram({0.001: 0, 0.1: 3, INF: 4})


@pytest.mark.parametrize(
    ("content", "reports", "running"),
    [
        ({}, False, None),
        ({"replicas": None}, True, None),
        ({"replicas": {}}, True, 0),
        ({"replicas": {"model-1": {"RUNNING": 2, "STARTING": 1}, "model-2": {"RUNNING": 1, "STOPPING": 4}}}, True, 3),
        ({"replicas": {"model-1": {"RUNNING": 1, "PENDING_MIGRATION": 1, "UPDATING": 1}}}, True, 2),
        ({"replicas": {"model-1": {"RUNNING": 1}, "model-2": {"RECOVERING": 1}}}, True, None),
        ({"replicas": {"model-1": {"RUNNING": "many", "PENDING_MIGRATION": -1}, "model-2": 7}}, True, 0),
        ({"replicas": [1]}, True, None),
    ],
)
def test_replicas_that_take_requests_are_counted(content: dict[str, Any], reports: bool, running: int | None) -> None:
    stats = parse_stats(content)
    assert (stats.reports_replicas, stats.running_replicas) == (reports, running)


@pytest.mark.parametrize(
    ("content", "addresses", "waits"),
    [
        ({"replicaAddresses": ["10.0.0.1"], "unplacedSeconds": 120}, {"10.0.0.1"}, True),
        ({"replicaAddresses": [], "unplacedSeconds": 119.9}, set(), False),
        ({"replicaAddresses": ["10.0.0.1", 5], "unplacedSeconds": "long"}, {"10.0.0.1", ""}, False),
        ({"replicaAddresses": "10.0.0.1", "unplacedSeconds": 500}, None, False),
        ({"replicas": {"model-1": {"RECOVERING": 1}}, "replicaAddresses": [], "unplacedSeconds": 500}, None, False),
        ({"unplacedSeconds": 500}, None, False),
    ],
)
def test_a_replica_without_a_pod_is_known_if_its_gateway_knows_all(
    content: dict[str, Any], addresses: set[str] | None, waits: bool
) -> None:
    stats = parse_stats({"replicas": {"model-1": {"STARTING": 1}}} | content)
    traffic = Traffic([stats], 1.0, error="")
    assert (traffic.replica_addresses, traffic.has_unplaced_replica) == (addresses, waits)


def test_all_gateways_have_to_know_of_a_replica_without_a_pod() -> None:
    waiting = GatewayStats("a", {}, replica_addresses=frozenset({"10.0.0.1"}), unplaced_seconds=300)
    placed = GatewayStats("b", {}, replica_addresses=frozenset({"10.0.0.2"}), unplaced_seconds=0)
    older = GatewayStats("c", {})
    assert Traffic([waiting, older]).has_unplaced_replica
    assert not Traffic([waiting, placed]).has_unplaced_replica
    assert Traffic([waiting, placed]).replica_addresses == frozenset({"10.0.0.1", "10.0.0.2"})


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"versions": []},
        {"versions": {"v1": "running"}},
        {"versions": {"v1": {"requests": "many", "errors": -1, "weight": True, "error": 5}}},
        {"versions": {"v1": {"firstTokenSeconds": {"buckets": {"fast": 1, "nan": 2}}, "running": float("nan")}}},
        {"versions": {"v1": {"running": 10**400}}},
        {"versions": {"v1": {"error": "\ud800"}}, "process": None},
    ],
)
def test_a_response_of_another_program_does_no_harm(content: dict[str, Any]) -> None:
    stats = parse_stats(content)
    traffic = Traffic([stats], 1.0, error="")
    assert not traffic.running("v1")
    traffic.problem("v1").encode()
    assert all(found.counters == VersionCounters() for found in stats.versions.values())
