"""An error about bad input names the place, the column and field of the job that are meant, and a remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from spotune.errors import JobError
from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
from spotune_trainer.data.rows.options import TextOptions
from tests.trainer.data.preparation.test_check import BAD
from tests.trainer.data.preparation.test_inputs import BROKEN

ANSWERS = TextOptions("causal", "{q}", "{a}")
CASES = {
    **{name: (text, file, content) for name, text, file, content, _ in BAD},
    **{name: (ANSWERS, file, content) for name, (file, content, _) in BROKEN.items()},
}
OF_FILES = {
    *("blank file", "no rows", "a header alone", "another format", "an unknown format", "compressed Parquet"),
    *("no Parquet", "not Parquet", "damaged Parquet", "a truncated Parquet"),
    *("a truncated Arrow file", "a truncated Arrow stream", "not Arrow", "an empty Arrow file"),
    *("cut gzip", "a truncated gzip", "not gzip", "a truncated bzip2", "a truncated xz", "not xz"),
    "a truncated Zstandard",
}
"""Cases that concern a whole file, so no line is named."""
MEANT = {
    "empty completion": ["dataset.completion"], "an empty completion": ["dataset.completion"],
    "missing field": ["'a'", "dataset.completion"], "a missing column": ["'a'", "dataset.completion"],
    "null": ["'q'", "dataset.prompt"], "a null": ["'q'", "dataset.prompt"], "mixed types": ["'q'", "dataset.prompt"],
    "a missing CSV column": ["'a'", "'b'"], "CSV column": ["'a'", "'b'"], "a duplicate column": ["q"],
    "unknown label": ["perhaps", "dataset.labels"], "undecided": ["{l}", "dataset.label"],
    "words and labels": ["'t'", "'l'"], "no words": ["'t'", "'words'", "dataset.text"],
    "words as text": ["'t'", "dataset.text"], "no labels": ["'l'", "dataset.label"],
    "no label": ["'l'", "dataset.label"],
    "empty text": ["dataset.positive"], "equal pair": ["chosen", "rejected"], "whitespace": ["chosen", "rejected"],
    "equal when cut": ["chosen", "rejected", "dataset.maxLength"], "long prompts": ["dataset.maxLength"],
    "no chat": ["'chat'", "'conversations'", "dataset.messages"], "no messages": ["'chat'", "dataset.messages"],
    "chat as text": ["'chat'", "dataset.messages"], "nothing said": ["'chat'", "dataset.messages"],
    "no answer": ["'chat'", "dataset.messages"], "ShareGPT": ["'chat'", "'from'", "dataset.messages"],
    "bad mark": ["message 2", "'chat'", "'train'"], "all marked": ["train", "weight"],
    "empty answer": ["message 2"], "lost turn": ["message 2", "chat template"],
    "no tools": ["'tools'", "dataset.tools"], "tools as text": ["'tools'", "dataset.tools"],
}  # fmt: skip
"""What the message has to name besides the place."""
REMEDY = re.compile(r"\b(add|convert|copy|correct|name|put|quote|raise|remove|rename|use|write)\b", re.IGNORECASE)


def test_every_case_is_known() -> None:
    assert OF_FILES | MEANT.keys() <= CASES.keys()
    assert len(CASES) == len(BAD) + len(BROKEN), "two cases have the same name"


@pytest.mark.parametrize("case", CASES)
def test_the_message_names_place_field_and_remedy(
    case: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    text, name, content = CASES[case]
    path = tmp_path / name
    if callable(content):
        content(path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(JobError) as refused:
        prepare([path], tmp_path / "out", PrepareOptions(text, processes=1), tokenizer)
    message = str(refused.value)
    place = re.search(re.escape(str(path)) + ("" if case in OF_FILES else r":\d+: "), message)
    assert place is not None, message
    assert [word for word in MEANT.get(case, []) if word not in message] == [], message
    assert REMEDY.search(message[place.end() :]), message
