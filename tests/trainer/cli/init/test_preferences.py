"""`spotune init` on preference pairs: the job learns from them, or says why it does not."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.command_line import run_spotune
from tests.trainer.cli.init.support.commands import Row, ask, init, prepared, refusal, write
from tests.trainer.data.chat.support.conversations import assistant, user
from tests.trainer.support.preference import preference_rows
from tests.trainer.support.tiny import save_source

pytestmark = pytest.mark.usefixtures("workplace")

TEXTS: list[Row] = [{"date": "today", **row} for row in preference_rows(40)]
ANSWERS: list[Row] = [
    {
        "prompt": row["prompt"],
        "chosen": [assistant(row["chosen"].strip())],
        "rejected": [assistant(row["rejected"].strip())],
    }
    for row in preference_rows(40)
]
CHATS: list[Row] = [
    {
        "prompt": row["prompt"],
        "messages": [user(row["prompt"]), *row["chosen"]],
        "chosen": [user(row["prompt"]), *row["chosen"]],
        "rejected": [user(row["prompt"]), *row["rejected"]],
    }
    for row in ANSWERS
]
AS_JSON: list[Row] = [{name: json.dumps(row[name]) for name in ("chosen", "rejected")} for row in CHATS]


@pytest.fixture(autouse=True)
def weights(workplace: Path) -> None:
    """Weights of `llama` and `chat`. Only their names are looked at."""
    for name in ("llama", "chat"):
        (workplace / name / "model.safetensors").touch()


@pytest.mark.parametrize(("rows", "file", "model", "prompt"), [
    (TEXTS, "rows.jsonl", "llama", "{prompt}"),
    (TEXTS, "rows.csv", "llama", "{prompt}"),
    (TEXTS, "rows.parquet", "chat", "{prompt}"),
    (CHATS, "rows.jsonl", "chat", ""),
    (CHATS, "rows.parquet", "chat", ""),
    (AS_JSON, "rows.csv", "chat", ""),
])  # fmt: skip
def test_a_causal_model_learns_from_pairs(
    rows: list[Row], file: str, model: str, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = init(capsys, write(rows, file), "--model", model)
    dataset, training = job.spec.dataset, job.spec.training
    assert (dataset.prompt, dataset.chosen, dataset.rejected) == (prompt, "{chosen}", "{rejected}")
    assert (training.objective, training.epochs, training.learning_rate) == ("dpo", 1, 1e-6)
    counts = prepared(job)
    assert (counts["documents"], counts["truncated"], counts["dropped"]) == (40, 0, 0)
    longer_answer = counts["inputTokens"]["max"]
    assert longer_answer <= dataset.max_length < 2 * longer_answer


@pytest.mark.parametrize(("rows", "model"), [(TEXTS, "llama"), (CHATS, "chat")])
def test_validate_plan_and_show_take_the_file(rows: list[Row], model: str, capsys: pytest.CaptureFixture[str]) -> None:
    init(capsys, write(rows), "--model", model)
    for words in (["validate", "job.yaml"], ["plan", "job.yaml"]):
        assert run_spotune(capsys, *words)[::2] == (0, ""), words
    _, shown, error = run_spotune(capsys, "data", "show", "1", "--job", "job.yaml")
    assert error == ""
    assert "SELECT count(*) FROM singer WHERE age > 0" in shown
    assert "SELECT name FROM singer LIMIT 0" in shown


def test_the_memory_plan_counts_both_answers(capsys: pytest.CaptureFixture[str]) -> None:
    size = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    save_source(Path("llama"), "causal", max_position_embeddings=4096, **size)
    rows = write([{"prompt": f"{n} " * 700, "chosen": "yes", "rejected": "no"} for n in range(20)])
    words = [rows, "--model", "llama", "--gpus", 1, "--device-memory", "4300MB"]
    pairs = init(capsys, *words).spec
    chosen_only = init(capsys, *words, "--force", "--prompt", "{prompt}", "--completion", "{chosen}").spec
    assert pairs.dataset.max_length == chosen_only.dataset.max_length
    assert (pairs.training.learning_rate, chosen_only.adapter) == (5e-6, None)
    assert pairs.adapter is not None


def test_a_model_without_weights_also_learns_the_chosen_answers(capsys: pytest.CaptureFixture[str]) -> None:
    Path("llama/model.safetensors").unlink()
    job = init(capsys, write(TEXTS), "--model", "llama")
    assert (job.spec.model.initialise, job.spec.training.objective) == ("random", "orpo")
    assert "no answers yet that dpo could keep it near" in " ".join(
        Path("job.yaml").read_text().replace("#", "").split()
    )


def test_a_seq2seq_model_learns_the_chosen_answers(capsys: pytest.CaptureFixture[str]) -> None:
    job = init(capsys, write(TEXTS), "--model", "t5")
    dataset = job.spec.dataset
    assert (dataset.prompt, dataset.completion, job.spec.training.objective) == ("{prompt}", "{chosen}", "sft")
    assert prepared(job)["documents"] == 40
    text = " ".join(Path("job.yaml").read_text().replace("#", "").split())
    assert "'rejected' is not used: to learn from preferences (objective dpo, orpo or simpo) needs a causal" in text


def test_the_format_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["init", write(TEXTS), "--model", "llama", "--force"]
    assert "40 rows (preference pairs), llama" in run_spotune(capsys, *words)[1]
    assert json.loads(run_spotune(capsys, *words, "--output", "json")[1])["data"]["format"] == "preference pairs"
    completion = [*words, "--prompt", "{prompt}", "--completion", "{chosen}"]
    assert "40 rows (prompt and completion), llama" in run_spotune(capsys, *completion)[1]
    found = json.loads(run_spotune(capsys, *completion, "--output", "json")[1])
    assert found["data"]["format"] == "prompt and completion"


def test_options_name_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"q": row["prompt"], "good": row["chosen"], "bad": row["rejected"], "response": "no"} for row in TEXTS]
    options = ["--prompt", "{q}\n", "--chosen", " {good}", "--rejected", " {bad}"]
    job = init(capsys, write(rows), "--model", "llama", *options)
    dataset = job.spec.dataset
    assert (dataset.prompt, dataset.chosen, dataset.rejected) == ("{q}\n", " {good}", " {bad}")
    assert job.spec.training.objective == "dpo"
    assert "not used are response." in Path("job.yaml").read_text()


@pytest.mark.parametrize(("rows", "model", "options", "message"), [
    (TEXTS, "llama", ["--chosen", "{chosen}"], "--chosen and --rejected have to be given together"),
    (TEXTS, "llama", ["--chosen", "{chosen}", "--rejected", "{rejected}"], "give the prompt with --prompt"),
    (TEXTS, "t5", ["--prompt", "{prompt}", "--chosen", "{chosen}", "--rejected", "{rejected}"],
     "learn the preferred answers with --prompt and --completion '{chosen}'"),
    (TEXTS, "llama", ["--chosen", "{chosen}", "--rejected", "{rejected}", "--completion", "{chosen}"],
     "give only one of"),
    (TEXTS, "llama", ["--prompt", "{prompt}", "--text", "chosen"], "give only one of"),
    (TEXTS, "llama", ["--prompt", "{prompt}", "--chosen", "chosen", "--rejected", "{rejected}"], "names no column"),
    (TEXTS, "llama", ["--prompt", "{prompt}", "--chosen", "{chosen}", "--rejected", "{bad}"], "no column 'bad'"),
    (CHATS, "chat", ["--prompt", "{prompt}", "--chosen", "{chosen}", "--rejected", "{rejected}"],
     "column 'chosen' has chats, which contain the prompt"),
    (CHATS, "llama", ["--chosen", "{chosen}", "--rejected", "{rejected}"], "need a tokenizer with a chat template"),
    (ANSWERS, "chat", ["--chosen", "{chosen}", "--rejected", "{rejected}"], "answers without their prompt"),
    ([*TEXTS, {"prompt": "Why?", "chosen": "So.", "rejected": "So."}], "llama", [],
     "rows.jsonl:41: chosen and rejected are the same answer"),
])  # fmt: skip
def test_pairs_that_cannot_be_learned_are_refused_with_the_fix(
    rows: list[Row], model: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, write(rows), "--model", model, *options)[1]


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
@pytest.mark.parametrize("prompt", ["text", "chat"])
def test_the_command_of_the_message_puts_the_prompt_before_the_answers(
    prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**row, "prompt": [user(row["prompt"])] if prompt == "chat" else row["prompt"]} for row in ANSWERS]
    _, error = refusal(capsys, write(rows), "--model", "chat")
    jq, options, program, source, _, target = shlex.split(error.partition("Add the prompt first: ")[2])
    assert (jq, source, target) == ("jq", "rows.jsonl", "pairs.jsonl")
    written = subprocess.run([jq, options, program, source], check=True, capture_output=True, text=True).stdout
    assert [json.loads(line)["rejected"] for line in written.splitlines()] == [row["rejected"] for row in CHATS]


@pytest.mark.parametrize(("rows", "model"), [(TEXTS, "llama"), (CHATS, "chat")])
def test_defaults_of_the_questions_are_the_decisions(
    rows: list[Row], model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = init(capsys, write(rows), "--model", model)
    Path("job.yaml").unlink()
    ask(monkeypatch, *[""] * 6)
    assert init(capsys, "rows.jsonl", "--model", model, "--interactive") == decided


def test_answers_name_the_pairs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"q": row["prompt"], "good": row["chosen"], "bad": row["rejected"]} for row in TEXTS]
    ask(monkeypatch, "chosen", "{good}", "{bad}", r"{q}\n", "", "")
    dataset = init(capsys, write(rows), "--model", "llama", "--interactive").spec.dataset
    assert (dataset.prompt, dataset.chosen, dataset.rejected) == ("{q}\n", "{good}", "{bad}")
