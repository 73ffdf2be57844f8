"""Prices of nodes in the chart's values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spotune.errors import UsageError
from spotune_operator.prices import find_price, parse_prices
from spotune_operator.settings import Settings

SPOT = {"labels": {"type": "a", "spot": "true"}, "price": "1 USD", "source": "list", "date": "2026-11-01"}
ANY = {"labels": {"type": "a"}, "price": "3 USD"}


def test_the_first_price_whose_labels_a_node_has_counts() -> None:
    prices = parse_prices(json.dumps([SPOT, ANY]))
    assert [getattr(find_price(prices, labels), "price", None) for labels in (
        {"type": "a", "spot": "true"}, {"type": "a"}, {"type": "b"},
    )] == ["1 USD", "3 USD", None]  # fmt: skip
    assert parse_prices("") == ()


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ([{"price": "1"}], "prices[0].price: '1' is not a price with its currency"),
        ([{"labels": {}}], "prices[0]: expected price"),
        ([{**ANY, "prize": 1}], "prices[0]: expected price"),
        ([ANY, {**ANY, "price": "1 EUR"}], "several currencies (EUR, USD)"),
        ([{**ANY, "labels": ["a"]}], "prices[0].labels: expected labels"),
        ({"price": "1 USD"}, "expected a list"),
    ],
)
def test_wrong_prices_stop_the_operator_at_its_start(prices: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        Settings.from_environment({"SPOTUNE_OPERATOR_PRICES": json.dumps(prices)})
    assert message in str(error.value)
