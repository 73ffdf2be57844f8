"""Answers that are not of an API server, as proxies and login pages give them, found by fuzzing."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotune.errors import KubernetesError
from tests.client.support.api_server import serving_cluster


@pytest.mark.parametrize(
    "body", ["<html>", "[]", "null", "[" * 5000, ""], ids=["html", "list", "null", "deep", "empty"]
)
def test_what_is_no_object_is_an_error_with_the_address(tmp_path: Path, body: str) -> None:
    message = r"http://.* responded with something else than .*\. Check that the kubeconfig's server is an API server"
    with serving_cluster(lambda *_: (200, body), tmp_path) as cluster, pytest.raises(KubernetesError, match=message):
        cluster.get("/api/v1/namespaces/team/pods/x")


@pytest.mark.parametrize(
    "body",
    [
        '{"kind": "Status"}',
        '{"items": {"a": 1}}',
        '{"items": [], "metadata": {"continue": "again"}}',
        '{"items": [], "metadata": {"continue": 1}}',
        '{"items": [], "metadata": true}',
    ],
)
def test_list_without_items_or_without_an_end_is_an_error(tmp_path: Path, body: str) -> None:
    message = r"something else than a list of objects\. Check that"
    with serving_cluster(lambda *_: (200, body), tmp_path) as cluster, pytest.raises(KubernetesError, match=message):
        cluster.items("/api/v1/namespaces/team/pods")
