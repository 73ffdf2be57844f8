"""The page in headless Chromium: a link fills the form, asks, and shows the streamed answer."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlencode

import pytest

from spotune_trainer.export.predict import Predictor
from tests.serve.support.exported import export_tiny_model
from tests.serve.support.live_service import LiveService

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the Debian package chromium"),
]


def text_of(page: str, element: str) -> str:
    """The text of an element of a page, by its id."""
    found = re.search(rf'id="{element}"[^>]*>(.*?)</', page, re.DOTALL)
    assert found is not None, f"the page has no {element}"
    return html.unescape(re.sub(r"<[^>]+>", "", found[1]))


def test_a_link_asks_and_shows_the_answer(tmp_path: Path) -> None:
    model = export_tiny_model(tmp_path / "model", "causal", "{question} of {table}")
    fields = {"question": "how many", "table": "singer"}
    predictor = Predictor.load(model)
    (expected,) = predictor.answer([predictor.prompt("", fields)])
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'chromium'}"]
    with LiveService(model) as service:
        url = f"{service.url}/?{urlencode({**fields, 'ask': 1})}"
        page = subprocess.run([*command, url], check=True, capture_output=True, text=True, timeout=120).stdout
    assert text_of(page, "answer").strip() == expected.answer.strip()
    assert re.search(r"first token after .+ · \d+ tokens", text_of(page, "meta"))
