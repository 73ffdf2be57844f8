"""The page is one file: it loads nothing from elsewhere, and its policy allows its own script only."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

from spotune_serve.gateway.served_model import ServedModel
from tests.serve.support.gateway_client import GatewayClient


class Elements(HTMLParser):
    """Collects the elements of a page, and which inputs are inside a label."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.unlabelled: list[str] = []
        self._labels = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._labels += tag == "label"
        if tag in {"input", "select", "textarea"} and not self._labels:
            self.unlabelled.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self._labels -= tag == "label"


def read_page(model: ServedModel) -> tuple[str, str]:
    response = GatewayClient(model, "ok").get("/")
    assert response.headers["content-type"].startswith("text/html")
    return response.text, response.headers["content-security-policy"]


def test_the_page_loads_nothing_from_elsewhere(sql_model: ServedModel) -> None:
    page, _ = read_page(sql_model)
    assert not re.search(r"https?://|//cdn|@import|\burl\(", page)
    elements = Elements()
    elements.feed(page)
    assert [value for _, name, value in elements.attributes if name in {"src", "href"}] == ["data:,"]
    assert not [name for _, name, _ in elements.attributes if name.startswith("on") or name == "style"]


def test_every_input_has_a_label(sql_model: ServedModel) -> None:
    elements = Elements()
    elements.feed(read_page(sql_model)[0])
    assert elements.unlabelled == []
    assert ("html", "lang", "en") in elements.attributes


def test_the_policy_allows_the_pages_own_script_and_style(sql_model: ServedModel) -> None:
    page, policy = read_page(sql_model)
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_texts_of_the_model_are_never_markup(sql_model: ServedModel) -> None:
    assert "innerHTML" not in read_page(sql_model)[0]
