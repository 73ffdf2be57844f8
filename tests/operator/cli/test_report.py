"""Money in the HTML report of a job in a cluster."""

from __future__ import annotations

from spotune_operator.cli.report import with_cost

PAGE = "<dl><div><dt>goodput</dt></div></dl><p>rest</p>"


def test_money_is_among_the_figures_of_the_page() -> None:
    cost = {"spent": 1.5, "saved": 2.25, "currency": "EUR", "source": "list <b>", "date": "2026-11-01"}
    page = with_cost(PAGE, {"cost": cost})
    assert "<dt>spent</dt><dd>1.50 EUR</dd>" in page
    assert "<dt>saved</dt><dd>2.25 EUR</dd></div></dl>" in page
    assert "saved against on demand (list &lt;b&gt;, 2026-11-01)." in page
    assert page.endswith("<p>rest</p>")


def test_cost_that_is_not_known_says_why_and_a_job_without_any_has_none() -> None:
    assert "Cost: no price for node n." in with_cost(PAGE, {"cost": {"unknown": "no price for node n"}})
    assert with_cost(PAGE, {}) == PAGE
