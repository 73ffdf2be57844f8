"""Kubernetes quantities in job files."""

import pytest
from pydantic import TypeAdapter, ValidationError

from spotune.units.quantities import Quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("500m", 0.5),
        ("1.5", 1.5),
        (".5", 0.5),
        ("200Gi", 200 * 2**30),
        ("1.5Ti", 1.5 * 2**40),
        ("64M", 64e6),
        ("1k", 1000),
        ("1Ki", 1024),
        ("1e3", 1000),
        ("1E", 1e18),
        ("2E2", 200),
        ("100n", 1e-7),
    ],
)
def test_suffixes_are_powers_of_1000_or_1024(text: str, value: float) -> None:
    assert Quantity(text).value == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "200GB", "200 Gi", "Gi", "-1", "1.2.3", "1K", "1gi", "8\n"])
def test_invalid_quantities_are_rejected_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="such as 8, 500m, 64Gi"):
        Quantity(text)


def test_numbers_in_yaml_become_text() -> None:
    adapter = TypeAdapter(Quantity)
    assert adapter.validate_python(8) == "8"
    assert adapter.validate_python(0.5).value == 0.5
    assert adapter.dump_python(Quantity("8")) == "8"
    with pytest.raises(ValidationError):
        adapter.validate_python(True)


def test_the_schema_takes_numbers_and_text_as_kubernetes_does() -> None:
    assert TypeAdapter(Quantity).json_schema()["x-kubernetes-int-or-string"] is True
