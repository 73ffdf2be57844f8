"""`spotune data show` and `stats` as people and scripts use it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from spotune.cli.main import main
from tests.trainer.data.chat.support.conversations import CONVERSATIONS, conversation_row, tokenizer_with


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, with chats and a tokenizer with Qwen3's chat template in it."""
    tokenizer_with("trl/qwen3", "<|im_start|>", "<|im_end|>").save_pretrained(tmp_path / "tokenizer")
    lines = [json.dumps(conversation_row(name)) + "\n" for name in CONVERSATIONS]
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)


OPTIONS = ["chats.jsonl", "--tokenizer", "tokenizer", "--messages", "chat", "--tools", "tools"]


def show(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["data", "show", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_brackets_enclose_what_is_trained_where_there_are_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("5", *OPTIONS) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("chats.jsonl:5: 94 tokens, 41 of them trained\n<|im_start|>user\nHow many?<|im_end|>\n")
    assert "<|im_start|>assistant\n⟦Ten.<|im_end|>⟧\n" in shown
    assert "⟦<think>\nI think.\n</think>\n\nBecause.<|im_end|>⟧" in shown


def test_the_answers_of_a_pair_are_shown_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"q": "How many?", "good": " Ten.", "bad": " No."}) + "\n")
    options = ["--tokenizer", "tokenizer", "--prompt", "{q}", "--chosen", "{good}", "--rejected", "{bad}"]
    assert show("1", "pairs.jsonl", *options) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1::2] == ["chosen:", "rejected:"]
    assert [line[: line.index("⟧")] for line in shown[2::2]] == [
        "How many?⟦ Ten.<|im_end|>",
        "How many?⟦ No.<|im_end|>",
    ]
    assert show("1", "pairs.jsonl", *options, "--output", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [[span["trained"] for span in found[name]] for name in ("spans", "rejectedSpans")] == [[False, True]] * 2
    assert found["trainedTokens"] == sum(found[name][1]["tokens"] for name in ("spans", "rejectedSpans"))


def test_a_label_is_that_of_an_answer_or_of_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"q": "How many?", "a": " Ten.", "good": True, "mood": "sad"}) + "\n"
    )
    options = ["1", "rows.jsonl", "--tokenizer", "tokenizer"]
    assert show(*options, "--prompt", "{q}", "--completion", "{a}", "--label", "{good}") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "desirable"
    assert show(*options, "--text", "{q}", "--label", "{mood}", "--labels", "sad", "--labels", "glad") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "label: sad"


def test_colours_show_what_is_trained(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert show("1", *OPTIONS) == 0
    shown = capsys.readouterr().out
    assert "\x1b[1;32m" in shown.partition("Ten.")[0].rpartition("assistant")[2]
    assert "⟦" not in shown


def test_json_has_spans_and_turns(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("2", *OPTIONS, "--train-on", "last", "--output", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["turns"] == {"2": "earlier", "4": "earlier", "6": "trained"}
    assert [span["text"] for span in found["spans"] if span["trained"]] == ["<think>\n\n</think>\n\nYes.<|im_end|>"]
    assert found["trainedTokens"] == sum(span["tokens"] for span in found["spans"] if span["trained"])


def test_a_job_file_gives_source_and_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(
        """
        apiVersion: spotune.dev/v1alpha1
        kind: FinetuneJob
        metadata: {name: tiny}
        spec:
          model: {source: tokenizer}
          dataset: {prepare: {source: chats.jsonl}, messages: chat, tools: tools, maxLength: 20}
          training: {epochs: 1}
        """
    )
    assert show("1", "--job", "job.yaml") == 0
    assert ": 20 tokens, 0 of them trained, 33 more cut\n" in capsys.readouterr().out


def test_turns_that_are_left_out_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer_with("trl/llama3", "<|eot_id|>", "<|eot_id|>").save_pretrained(tmp_path / "tokenizer")
    assert show("4", *OPTIONS) == 0
    shown = capsys.readouterr().out
    assert "message 2: notRendered\n" in shown
    assert "does not render the tool call 1 of message 2 (assistant)" in shown


def test_a_row_that_does_not_exist_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("9", *OPTIONS) == 2
    assert "there is no row 9: the input has 5 rows" in capsys.readouterr().err


def stats(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["data", "stats", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_stats_show_lengths_and_what_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert stats(*OPTIONS, "--max-length", "100") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{len(CONVERSATIONS)} rows, 0 of them with the text of a row before\n")
    bar = next(line for line in shown.splitlines() if "← maximum length 100" in line)
    assert bar.split()[0] == "65-128"
    assert "█" in bar
    now = next(line for line in shown.splitlines() if "100 (now)" in line)
    assert "(0.0%)" not in now, "some are cut"


def test_stats_as_json_have_the_numbers_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert stats(*OPTIONS, "--rows", "2", "--output", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 2
    assert found["input"]["trainedTokens"] > 0
    assert "target" not in found
    assert [cut["limit"] for cut in found["input"]["cuts"]][-1] == found["input"]["limit"]


MIXTURE = """
apiVersion: spotune.dev/v1alpha1
kind: FinetuneJob
metadata: {name: tiny}
spec:
  model: {source: tokenizer, task: causal}
  dataset:
    text: body
    maxLength: 16
    mixture:
      - {name: long, prepare: {source: long.jsonl}}
      - {name: short, prepare: {source: short.csv}}
  training: {epochs: 1}
"""


@pytest.fixture
def mixture(tmp_path: Path) -> None:
    """A job with two sources; their last texts are the same."""
    rows = [{"body": "how many singers are there " * 9}, {"body": "how many"}]
    (tmp_path / "long.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "short.csv").write_text("body\nhow long\nhow many\n")
    (tmp_path / "mixture.yaml").write_text(MIXTURE)


@pytest.mark.usefixtures("mixture")
def test_a_row_of_each_source_of_a_mixture_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("2", "--job", "mixture.yaml") == 0
    shown = capsys.readouterr().out
    assert re.findall(r"source (\w+)\n\S*/(\S+): ", shown) == [("long", "long.jsonl:2"), ("short", "short.csv:3")]
    assert show("1", "--job", "mixture.yaml", "--source", "short", "--output", "json") == 0
    assert json.loads(capsys.readouterr().out)["sources"]["short"]["spans"][0]["text"].startswith("how long")


@pytest.mark.usefixtures("mixture")
def test_stats_of_a_mixture_are_by_source_and_in_total(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "stats", "--job", "mixture.yaml", "--output", "json"])
    found = json.loads(capsys.readouterr().out)
    assert {name: (each["rows"], each["duplicates"]) for name, each in found["sources"].items()} == {
        "long": (2, 0),
        "short": (2, 0),
    }
    total = found["total"]
    assert (total["rows"], total["duplicates"]) == (4, 1)
    for name in ("tokens", "trainedTokens"):
        assert total["input"][name] == sum(each["input"][name] for each in found["sources"].values())
    assert total["input"]["cuts"][0] == found["sources"]["long"]["input"]["cuts"][0], "only a long row is cut"
    with pytest.raises(SystemExit):
        main(["data", "stats", "--job", "mixture.yaml"])
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if "source" in line] == ["source long", "source short", "all sources"]


@pytest.mark.usefixtures("mixture")
def test_files_and_a_source_of_the_mixture_are_not_given_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("1", "long.jsonl", "--job", "mixture.yaml", "--source", "short") == 2
    assert "--source is a source of the job's mixture" in " ".join(capsys.readouterr().err.split())
