"""The page in headless Chromium: a link fills the form, asks, and shows the streamed answer."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from urllib.parse import urlencode

import pytest

from docs.screenshot import ANSWERED
from spotune_trainer.export.predict import Predictor
from tests.serve.support.browser import CHROMIUM, Browser
from tests.serve.support.exported import export_tiny_model
from tests.serve.support.live_service import LiveService

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which(CHROMIUM) is None, reason="no chromium: apt-get install chromium"),
]


def test_a_link_asks_and_shows_the_answer(tmp_path: Path) -> None:
    model = export_tiny_model(tmp_path / "model", "causal", "{question} of {table}")
    fields = {"question": "how many", "table": "singer"}
    predictor = Predictor.load(model)
    (expected,) = predictor.answer([predictor.prompt("", fields)])
    with LiveService(model) as service, Browser() as browser:
        browser.open(f"{service.url}/?{urlencode({**fields, 'ask': 1})}")
        browser.wait_for(ANSWERED)
        assert browser.evaluate("byId('answer').textContent").strip() == expected.answer.strip()
        assert browser.evaluate("byId('error').textContent") == ""
        meta = browser.evaluate("byId('meta').textContent")
        assert browser.screenshot().startswith(b"\x89PNG")
    assert re.search(r"first token after .+ · \d+ tokens", meta)
