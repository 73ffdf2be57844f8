"""Prices of nodes from the chart's values: by labels of nodes, with their source and date."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spotune.errors import UsageError
from spotune.units.money import Price


@dataclass(frozen=True)
class NodePrice:
    """The price of nodes with certain labels.

    Attributes:
        labels: Labels that such a node has.
        price: Of a node and hour.
        on_demand: Of the same node on demand; None if it is not known.
        source: Where the price is from.
        date: Day of the price, such as 2026-11-01.
    """

    price: Price
    labels: Mapping[str, str] = field(default_factory=dict)
    on_demand: Price | None = None
    source: str = ""
    date: str = ""

    def fits(self, labels: Mapping[str, str]) -> bool:
        """Whether it is the price of a node with these labels."""
        return all(labels.get(key) == value for key, value in self.labels.items())


def find_price(prices: Iterable[NodePrice], labels: Mapping[str, str]) -> NodePrice | None:
    """The first price that fits a node with these labels; None if none does."""
    return next((price for price in prices if price.fits(labels)), None)


def parse_prices(text: str) -> Sequence[NodePrice]:
    """The prices of a JSON list, as the chart writes it; none if it is empty.

    Raises:
        UsageError: An entry is no price, or the currencies differ.
    """
    if not text:
        return ()
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"prices: invalid JSON: {error}") from error
    if not isinstance(entries, list):
        raise UsageError("prices: expected a list of prices, each with labels and price")
    found = [_parse(entry, f"prices[{index}]") for index, entry in enumerate(entries)]
    currencies = {price.currency for each in found for price in (each.price, each.on_demand) if price is not None}
    if len(currencies) > 1:
        raise UsageError(f"prices: have several currencies ({', '.join(sorted(currencies))}): use one")
    return tuple(found)


def _parse(entry: Any, place: str) -> NodePrice:
    known = {"labels", "price", "onDemandPrice", "source", "date"}
    if not isinstance(entry, dict) or "price" not in entry or entry.keys() - known:
        raise UsageError(f"{place}: expected price, and perhaps labels, onDemandPrice, source and date")
    labels = entry.get("labels") or {}
    if not isinstance(labels, dict):
        raise UsageError(f"{place}.labels: expected labels of nodes with their values")
    on_demand = entry.get("onDemandPrice")
    return NodePrice(
        price=_price(entry["price"], f"{place}.price"),
        labels={str(key): str(value) for key, value in labels.items()},
        on_demand=_price(on_demand, f"{place}.onDemandPrice") if on_demand else None,
        source=str(entry.get("source", "")),
        date=str(entry.get("date", "")),
    )


def _price(text: Any, place: str) -> Price:
    try:
        return Price(str(text))
    except ValueError as error:
        raise UsageError(f"{place}: {error}") from error
