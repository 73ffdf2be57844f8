"""Tables and plots of docs/benchmarks.md are those of the committed outputs."""

from __future__ import annotations

import pytest

from benchmarks import throughput_page
from benchmarks.throughput_tables import significant
from tests import ROOT


def test_tables_and_plots_are_those_of_what_was_measured() -> None:
    stale = [path.name for path, content in throughput_page.files().items() if path.read_text() != content]
    assert stale == [], "run `make manifests`"


def test_a_table_that_was_edited_is_found() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert "| 1.1B, one GPU | 16, 64 | 1 | no | 56,099 | 43.7 % | 95.6 GB |" in page
    assert throughput_page.fill(page.replace("56,099", "65,099")) == page
    with pytest.raises(ValueError, match="no comments for zero-3"):
        throughput_page.fill(page.replace("<!-- zero-3: end -->", ""))


@pytest.mark.parametrize(("figure", "text"), [(1234.5, "1,234"), (844.97, "845"), (13.9504, "14.0"), (2.206, "2.21")])
def test_rates_have_three_digits(figure: float, text: str) -> None:
    assert significant(figure) == text
