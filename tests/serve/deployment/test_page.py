"""The page in headless Chromium: a link fills the form and asks, a chat goes on, and answers are shown as they come."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from urllib.parse import urlencode

import pytest

from docs.screenshot import ANSWERED
from spotune_trainer.export.predict import Predictor
from tests.serve.support.browser import CHROMIUM, Browser
from tests.serve.support.exported import export_tiny_chat_model, export_tiny_model
from tests.serve.support.live_service import LiveService

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which(CHROMIUM) is None, reason="no chromium: apt-get install chromium"),
]
META = r"first token after \d+ ms · \d+\.\d tokens/s · \d+ tokens( · stopped at the maximum)?"
GREEDY = """{
  const original = window.fetch;
  window.fetch = (url, options) => {
    const body = JSON.stringify({...JSON.parse(options.body), temperature: 0});
    return original(url, {...options, body});
  };
}"""
"""JavaScript: the page's questions are answered greedily; its chats are sampled otherwise."""
WATCH = """{
  window.lengths = new Set();
  setInterval(() => {
    const answer = document.querySelector('.message.assistant:last-child :last-child');
    if (byId('send').disabled && answer?.textContent) lengths.add(answer.textContent.length);
  }, 2);
}"""
"""JavaScript: collect the lengths that the text of an answer has while the request runs."""
MESSAGES = "[...document.querySelectorAll('.message')].map(each => [each.className, each.lastChild.textContent])"
CHAT_ANSWERED = "!byId('send').disabled && byId('chat-meta').textContent"


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
    assert re.fullmatch(META, meta)


def test_a_chat_goes_on_and_its_answers_are_shown_as_they_come(tmp_path: Path) -> None:
    model = export_tiny_chat_model(tmp_path / "model")
    with LiveService(model) as service, Browser() as browser:
        browser.open(service.url)
        browser.wait_for("!byId('form-card').hidden")
        browser.evaluate(GREEDY)
        browser.evaluate(WATCH)
        for question in ("how many singers", "and how many concerts"):
            browser.evaluate(f"areas()[0].value = {json.dumps(question)}; byId('send').click()")
            browser.wait_for(CHAT_ANSWERED)
        shown = browser.evaluate(MESSAGES)
        lengths = browser.evaluate("[...lengths]")
        meta = browser.evaluate("byId('chat-meta').textContent")
        error = browser.evaluate("byId('error').textContent")
        browser.evaluate("byId('clear').click()")
        after_clearing = browser.evaluate(MESSAGES)
    assert error == ""
    assert shown == expected_chat(model, "how many singers", "and how many concerts")
    assert len(lengths) > 2, "an answer must grow while its request runs"
    assert re.fullmatch(META, meta)
    assert after_clearing == []


def expected_chat(model: Path, *questions: str) -> list[list[str]]:
    """CSS class and text of each message of a chat, as `spotune predict` answers."""
    predictor, messages = Predictor.load(model), []
    for question in questions:
        messages.append({"role": "user", "content": question})
        (answer,) = predictor.answer([predictor.prompt("", {"messages": messages})])
        messages.append({"role": "assistant", "content": answer.answer})
    return [[f"message {each['role']}", each["content"]] for each in messages]
