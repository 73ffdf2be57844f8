"""Amounts of money in job files."""

import pytest
from pydantic import TypeAdapter

from spotune.units.money import Money


@pytest.mark.parametrize(("text", "amount", "currency"), [("120 USD", 120.0, "USD"), ("0.50 EUR", 0.5, "EUR")])
def test_amount_and_currency(text: str, amount: float, currency: str) -> None:
    money = TypeAdapter(Money).validate_python(text)
    assert (money.amount, money.currency) == (amount, currency)


@pytest.mark.parametrize("value", ["120", 120, "USD", "120USD", "120 usd", "-1 USD", "0 USD", "0.00 USD", "1e3 USD"])
def test_price_without_currency_and_other_texts_are_rejected(value: object) -> None:
    with pytest.raises(ValueError, match="expected an amount above 0 with its currency, such as 120 USD"):
        TypeAdapter(Money).validate_python(value)
