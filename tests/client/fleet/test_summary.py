"""The usage by team: what is added up, what is not known, and the page."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from spotune_client.fleet.page import page
from spotune_client.fleet.summary import cells, fleet_of
from tests.operator.support.objects import NOW, condition, finetune_job


def job(namespace: str, team: str = "", *conditions: dict[str, Any], **status: Any) -> dict[str, Any]:
    """A job of a team."""
    found = finetune_job(*conditions, **status)
    labels = {"spotune.dev/team": team} if team else {}
    return {**found, "metadata": {**found["metadata"], "namespace": namespace, "labels": labels}}


JOBS = [
    job(
        "a",
        "search",
        phase="Training",
        gpuSeconds={"spot": 36_000, "onDemand": 0},
        goodput=0.9,
        cost={"spent": 20.0, "saved": 40.0, "currency": "USD"},
    ),
    job(
        "b",
        "search",
        condition("Failed", "True"),
        phase="Failed",
        gpuSeconds={"spot": 0, "onDemand": 3_600},
        goodput=0.0,
        cost={"spent": 3.0, "saved": 0.0, "currency": "EUR"},
    ),
    job("b", phase="Complete", gpuSeconds={"spot": 7_200, "onDemand": 0}),
    job("c", phase="Provisioning"),
]


def test_hours_cost_goodput_and_waste_are_added_up_by_team() -> None:
    fleet = fleet_of(JOBS)
    assert [(usage.team, usage.jobs, usage.gpu_hours) for usage in fleet.teams] == [
        ("search", 2, 11.0),
        ("b", 1, 2.0),
        ("c", 1, 0.0),
    ]
    search = fleet.teams[0]
    assert search.goodput == pytest.approx(9 / 11)  # weighted by GPU hours, and not 0.45
    assert search.wasted_hours == pytest.approx(2.0)
    assert search.as_json()["cost"] == [
        {"currency": "EUR", "spent": 3.0, "saved": 0.0, "wasted": 3.0},
        {"currency": "USD", "spent": 20.0, "saved": 40.0, "wasted": pytest.approx(2.0)},
    ]
    assert cells(search)[1:6] == ["2", "1", "1", "11.0", "91%"]
    assert cells(search)[8] == "3.00 EUR + 20.00 USD"


def test_what_is_not_known_is_a_dash_with_the_reason() -> None:
    fleet = fleet_of(JOBS)
    assert cells(fleet.teams[1])[6:] == ["-", "-", "-", "-"]
    assert fleet.note.startswith("1 of 4 jobs have no cost")
    assert fleet_of(JOBS[:2]).note == ""
    unpriced = job("a", gpuSeconds={"spot": 3600}, cost={"currency": "", "unknown": "no price for zone b"})
    assert fleet_of([unpriced]).note == "1 of 1 jobs have no cost: no price for zone b"


def test_teams_are_namespaces_or_values_of_another_label() -> None:
    assert {usage.team for usage in fleet_of(JOBS, "namespace").teams} == {"a", "b", "c"}
    assert {usage.team for usage in fleet_of(JOBS, label="cost-centre").teams} == {"a", "b", "c"}


class Strict(HTMLParser):
    """Collects the tags and fails at an address."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}
        self.tags.append(tag)


def test_the_page_is_one_file_and_escapes_names() -> None:
    written = page(fleet_of([*JOBS, job("d", "<b>x", gpuSeconds={"spot": 3600})]), "all namespaces", NOW)
    parser = Strict()
    parser.feed(written)
    assert parser.tags.count("tr") == 1 + 4 + 1
    assert "script" not in parser.tags
    assert "<b>" not in written
    assert "&lt;b&gt;x" in written
