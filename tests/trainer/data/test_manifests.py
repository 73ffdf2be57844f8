"""The sources of a mixture have to be tokenized alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spotune.errors import JobError
from spotune_trainer.data.manifests import check_agreement, parse_manifest, read_manifest


def manifest(tokenizer: str = "abc", **text: Any) -> dict[str, Any]:
    options = {"task": "causal", "maxLength": 512, "maxCompletionLength": 0, "packing": False, **text}
    return {"tokenizerHash": tokenizer, "options": {"text": options}}


def test_sources_that_are_alike_pass_packed_or_not() -> None:
    check_agreement({"sql": manifest(), "chat": manifest(packing=True), "other-tool": None})
    check_agreement({})


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (manifest("def"), "have another tokenizer, so"),
        (manifest(task="seq2seq"), r"have another task \(causal and seq2seq\), so"),
        (manifest(maxLength=256), r"have another maxLength \(512 and 256\), so"),
        (manifest(maxCompletionLength=64), r"have another maxCompletionLength \(0 and 64\), so"),
    ],
)
def test_two_sources_that_differ_are_named(other: dict[str, Any], problem: str) -> None:
    with pytest.raises(JobError, match=rf"spec\.dataset\.mixture: the sources sql and chat {problem}"):
        check_agreement({"other-tool": None, "sql": manifest(), "chat": other})


def test_a_manifest_is_in_the_folder_or_beside_the_splits(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    assert read_manifest(tmp_path / "train") is None
    (tmp_path / "manifest.json").write_text(json.dumps(manifest("beside")))
    found = read_manifest(tmp_path / "train")
    assert found is not None
    assert found["tokenizerHash"] == "beside"
    (tmp_path / "train" / "manifest.json").write_text(json.dumps(manifest("within")))
    assert (read_manifest(tmp_path / "train") or {})["tokenizerHash"] == "within"


def test_a_manifest_of_another_tool_is_ignored_and_a_broken_one_is_named() -> None:
    assert parse_manifest(b'{"files": []}', "a/manifest.json") is None
    assert parse_manifest(b"[]", "a/manifest.json") is None
    with pytest.raises(JobError, match=r"a/manifest\.json is not JSON .*`spotune shard`"):
        parse_manifest(b"{", "a/manifest.json")
