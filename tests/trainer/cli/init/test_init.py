"""`spotune init` as people and scripts use it: the file that it writes is loaded, planned and prepared unchanged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import OPTConfig

from spotune.job import FinetuneJob
from spotune.job_file.load import load_job
from tests.command_line import run_spotune
from tests.trainer.cli.init.support.commands import Row, ask, init, prepared, refusal, write
from tests.trainer.data.chat.support.conversations import CONVERSATIONS, conversation_row, tokenizer_with
from tests.trainer.support.tiny import save_source

pytestmark = pytest.mark.usefixtures("workplace")

TOPICS = ["singers", "ships", "teams", "cities", "players"]
QUESTIONS: list[Row] = [
    {"question": f"How many {TOPICS[n % 5]} have more than {n} items" + " or so" * (n % 7) + "?", "answer": f"{n * 3}"}
    for n in range(60)
]
ALPACA: list[Row] = [
    {
        "instruction": f"Count to {n}.",
        "input": "" if n % 2 else "Slowly.",
        "output": " ".join(map(str, range(1 + n % 9))),
    }
    for n in range(40)
]
TEXTS: list[Row] = [
    {"text": f"A film about {TOPICS[n % 5]} and {n} ships. " * (n % 4 + 1), "url": n} for n in range(80)
]
CHATS: list[Row] = [conversation_row(name) for name in CONVERSATIONS] * 5


@pytest.mark.parametrize("file", ["rows.jsonl", "rows.csv", "rows.parquet"])
@pytest.mark.parametrize(("model", "task", "prompt"), [
    ("t5", "seq2seq", "{question}"),
    ("llama", "causal", "### Question:\n{question}\n\n### Response:\n"),
])  # fmt: skip
def test_questions_become_prompt_and_completion(
    model: str, task: str, prompt: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = init(capsys, write(QUESTIONS, file), "--model", model)
    dataset = job.spec.dataset
    assert (job.spec.model.task, dataset.prompt, dataset.completion) == (task, prompt, "{answer}")
    assert (job.spec.model.dtype, job.spec.model.initialise) == ("float32", "random")
    assert (job.spec.workers.count, job.spec.workers.gpus) == (1, 0)
    counts = prepared(job)
    assert (counts["documents"], counts["truncated"], counts["dropped"]) == (60, 0, 0)
    assert counts["inputTokens"]["max"] <= dataset.max_length < 2 * counts["inputTokens"]["max"]


def test_missing_rows_are_named_before_a_model_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, message = refusal(capsys, "nothing.jsonl", "--model", "no-such-model")
    assert (code, "nothing.jsonl" in message) == (20, True), message


def test_chats_become_messages_with_their_tools(capsys: pytest.CaptureFixture[str]) -> None:
    job = init(capsys, write(CHATS), "--model", "chat")
    assert (job.spec.dataset.messages, job.spec.dataset.tools) == ("chat", "tools")
    assert prepared(job)["turns"].keys() == {"trained"}


def test_chats_in_a_csv_column_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"id": n, "conversation": json.dumps(CONVERSATIONS["multi"])} for n in range(4)]
    job = init(capsys, write(rows, "rows.csv"), "--model", "chat")
    assert job.spec.dataset.messages == "conversation"
    assert prepared(job)["turns"] == {"trained": 12}


def test_plain_text_is_packed(capsys: pytest.CaptureFixture[str]) -> None:
    job = init(capsys, write(TEXTS), "--model", "llama")
    dataset = job.spec.dataset
    assert (dataset.text, dataset.packing, dataset.max_length) == ("text", True, 128)
    counts = prepared(job)
    assert (counts["truncated"], counts["dropped"]) == (0, 0)


def test_validate_plan_and_show_take_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    init(capsys, write(ALPACA), "--model", "t5")
    for words in (["validate", "job.yaml"], ["plan", "job.yaml"], ["data", "show", "1", "--job", "job.yaml"]):
        code, out, error = run_spotune(capsys, *words)
        assert (code, error) == (0, ""), words
        assert out


def test_comments_have_what_was_observed(capsys: pytest.CaptureFixture[str]) -> None:
    questions = [{"question": f"How many are {n}?", "answer": "7"} for n in range(120)]
    rows = [*questions, *questions[:3], {"question": "how many " * 400, "answer": "7"}]
    job = init(capsys, write(rows), "--model", "llama")
    text = " ".join(line.strip(" #") for line in Path("job.yaml").read_text().splitlines())
    assert "124 rows, columns question, answer; letters are mostly of the script Latin." in text
    assert "3 rows repeat the text of an earlier one: remove them" in text
    cut = prepared(job)["truncated"]
    assert cut == 1
    assert f"{job.spec.dataset.max_length} cuts {cut} rows (0.8%)" in text


def test_sources_are_relative_to_the_job_file(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    words = ["init", write(QUESTIONS), "--model", workplace / "t5", "--output-file", "jobs/new/sql.yaml"]
    assert run_spotune(capsys, *words)[0] == 0
    job = load_job("jobs/new/sql.yaml")
    assert job.spec.dataset.prepare is not None
    assert job.spec.dataset.prepare.source == "../../rows.jsonl"
    assert job.spec.model.source == str(workplace / "t5")
    assert run_spotune(capsys, "plan", "jobs/new/sql.yaml")[0] == 0


def test_the_file_can_be_printed(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    code, out, _ = run_spotune(capsys, "init", write(QUESTIONS), "--model", "t5", "--output-file", "-", "--name", "sql")
    assert code == 0
    assert not Path("job.yaml").exists()
    (workplace / "printed.yaml").write_text(out)
    assert load_job("printed.yaml").metadata.name == "sql"


def test_json_has_observations_decisions_and_the_job_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_spotune(capsys, "init", write(QUESTIONS), "--model", "t5", "--output", "json")
    assert code == 0
    found = json.loads(out)
    assert FinetuneJob.model_validate(found["job"]) == load_job(found["file"])
    assert found["data"]["rows"] == 60
    assert found["data"]["columns"][0] == {
        "name": "question", "kinds": {"text": 60}, "missing": 0, "empty": 0, "script": "Latin"
    }  # fmt: skip
    assert found["model"]["task"] == "seq2seq"
    assert "spec.training.learningRate" in found["reasons"]


def test_an_existing_file_is_replaced_only_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text("mine")
    code, _, error = run_spotune(capsys, "init", write(QUESTIONS), "--model", "t5")
    assert (code, Path("job.yaml").read_text()) == (2, "mine")
    assert error == "job.yaml exists: give another --output-file, or replace it with --force\n"
    assert init(capsys, "rows.jsonl", "--model", "t5", "--force").spec.model.task == "seq2seq"


@pytest.fixture
def big(workplace: Path) -> str:
    """A model of 135 million parameters. Only the name of its weights is looked at."""
    save_source(workplace / "big", "causal", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8)
    (workplace / "big/model.safetensors").touch()
    return "big"


@pytest.mark.parametrize(("memory", "adapter", "minimum"), [
    ("80GB", None, 1),
    ("3000MB", None, 4),
    ("2000MB", "none", 1),
    ("1800MB", "nf4", 1),
])  # fmt: skip
def test_memory_of_the_gpus_decides_what_is_trained_and_by_how_few(
    memory: str, adapter: str | None, minimum: int, big: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = init(capsys, write(QUESTIONS), "--model", big, "--gpus", 4, "--device-memory", memory).spec
    assert (spec.model.dtype, spec.workers.count, spec.workers.gpus) == ("bfloat16", 4, 1)
    assert ((spec.adapter.quantization if spec.adapter else None), spec.workers.min) == (adapter, minimum)
    assert spec.training.learning_rate == (2e-4 if adapter else 5e-5)
    code, out, error = run_spotune(capsys, "plan", "job.yaml", "--device-memory", memory, "--output", "json")
    assert code == 0, error
    assert [workers["fits"] for workers in json.loads(out)["workers"]] == [True] * (1 if minimum == 4 else 2)


@pytest.mark.parametrize("weights", [True, False])
def test_a_model_that_does_not_fit_is_refused(weights: bool, big: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not weights:
        Path(big, "model.safetensors").unlink()
    memory = "700MB" if weights else "2000MB"  # adapters would fit, but not beside random weights
    code, error = refusal(capsys, write(QUESTIONS), "--model", big, "--gpus", 1, "--device-memory", memory)
    assert code == 20
    assert "does not fit on 1 worker" in error
    assert "What would help" in error


def test_a_model_type_without_a_memory_plan_gets_explicit_values(capsys: pytest.CaptureFixture[str]) -> None:
    size: dict[str, Any] = {
        "hidden_size": 16,
        "ffn_dim": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 384,
    }
    save_source(Path("opt"), "causal")
    OPTConfig(**size, word_embed_proj_dim=16, max_position_embeddings=128).save_pretrained("opt")
    execution = init(capsys, write(QUESTIONS), "--model", "opt").spec.execution
    assert (execution.micro_batch_size, execution.gradient_checkpointing) == (1, True)
    assert execution.zero_stage == 2


def test_lengths_stay_within_the_positions_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    save_source(Path("short"), "causal", max_position_embeddings=64)
    rows = [{"question": "how many " * 50, "answer": "7"}, *QUESTIONS[:5]]
    assert init(capsys, write(rows), "--model", "short").spec.dataset.max_length == 64
    assert "positions for no more than 64 tokens" in " ".join(Path("job.yaml").read_text().replace("#", "").split())


def test_rows_whose_prompt_fills_the_positions_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    save_source(Path("short"), "causal", max_position_embeddings=64)
    rows = [{"question": "how many " * 50, "answer": "7"}, *QUESTIONS[:5]]
    job = init(capsys, write(rows), "--model", "short")
    left_out = prepared(job)["dropped"]
    assert left_out > 0
    assert job.spec.dataset.max_skipped == left_out
    assert f" {left_out} rows are left out" in " ".join(Path("job.yaml").read_text().replace("#", "").split())


def test_rows_of_prompts_alone_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    save_source(Path("short"), "causal", max_position_embeddings=64)
    rows = [{"question": f"how many {n} " * 50, "answer": "7"} for n in range(3)]
    code, error = refusal(capsys, write(rows), "--model", "short")
    assert code == 20
    assert "no row has anything to learn within 64 tokens" in error


def test_names_of_columns_cannot_break_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{'a: "#\n\x07': "x", "question": f"é \u2028 {n}", "answer": n, "completion": None} for n in range(5)]
    job = init(capsys, write(rows), "--model", "t5")
    assert job.spec.dataset.completion == "{answer}"


BROKEN: list[tuple[list[Row], str, int, str]] = [
    ([], "t5", 20, r"rows\.jsonl has no rows"),
    (QUESTIONS, "nowhere", 20, r"there is no folder 'nowhere'"),
    (
        [*QUESTIONS, {"question": "Why?"}],
        "t5",
        20,
        r"column 'answer' has no value in some rows; the first is rows\.jsonl:61",
    ),
    ([{"de": "ja", "en": "yes"}], "t5", 20, r"cannot be told from the columns: 'de' \(text\), 'en' \(text\).*--prompt"),
    ([{"translation": {"de": "ja", "en": "yes"}}], "t5", 20, r"'translation' \(object\)"),
    ([{"text": "a"}], "t5", 20, "a seq2seq model learns a completion for each prompt"),
    (CHATS, "t5", 20, "column 'chat' has chats, which seq2seq models cannot learn"),
    (CHATS, "llama", 20, "the tokenizer has no chat template.*--tokenizer"),
    (
        [{"conversations": [{"from": "observation", "value": "?"}]}],
        "chat",
        20,
        r"ShareGPT's form.*jq -c '\.conversations \|=",
    ),
]


@pytest.mark.parametrize(("rows", "model", "code", "message"), BROKEN, ids=[case[3][:40] for case in BROKEN])
def test_broken_input_is_refused_with_the_fix(
    rows: list[Row], model: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, error = refusal(capsys, write(rows), "--model", model)
    assert found == code
    assert re.search(message, error), error


def test_a_template_that_loses_answers_is_refused_by_file_and_line(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer_with("trl/llama3", "<|eot_id|>", "<|eot_id|>").save_pretrained("chat")
    rows = write(CHATS[:5])
    code, error = refusal(capsys, rows, "--model", "chat")
    assert code == 20
    assert "rows.jsonl:4: " in error
    assert "does not render the tool call 1 of message 2" in error
    assert init(capsys, rows, "--model", "chat", "--max-skipped", 5).spec.dataset.max_skipped == 5


def test_weights_that_are_not_loaded_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("llama/pytorch_model.bin").write_bytes(b"pickle")
    assert "has weights only as pytorch_model.bin" in refusal(capsys, write(QUESTIONS), "--model", "llama")[1]


@pytest.mark.parametrize(("options", "message"), [
    (["--prompt", "{question}"], "--prompt and --completion have to be given together"),
    (["--text", "question", "--messages", "question"], "give only one of"),
    (["--prompt", "{question}", "--completion", "{sql}"], "there is no column 'sql'; the rows have 'question' (text)"),
    (["--prompt", "{question", "--completion", "{answer}"], "has a lone '{'"),
    (["--device", "h200", "--gpus", "0"], "give the number of GPUs, too: --gpus 1"),
    (["--device", "h200", "--device-memory", "1GB"], "set only one of them"),
    (["--output", "json", "--output-file", "-"], "standard output holds one of them only"),
    (["--name", "My job"], "'My job' is not a valid Kubernetes name"),
])  # fmt: skip
def test_options_that_cannot_work_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, write(QUESTIONS), "--model", "t5", *options)[1]


@pytest.mark.parametrize(("rows", "model"), [(ALPACA, "llama"), (TEXTS, "llama"), (CHATS, "chat")])
def test_defaults_of_the_questions_are_the_decisions(
    rows: list[Row], model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = init(capsys, write(rows), "--model", model)
    Path("job.yaml").unlink()
    ask(monkeypatch, *[""] * 5)
    assert init(capsys, "rows.jsonl", "--model", model, "--interactive") == decided


def test_answers_replace_the_decisions(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write([{"de": f"ja {n}", "en": f"yes {n}"} for n in range(5)])
    ask(monkeypatch, "neither", "completion", r"{fr}", r"{de}\n", "{en}", "none", "7", "other.yaml")
    code, _, error = run_spotune(capsys, "init", rows, "--model", "llama", "--interactive")
    assert code == 0, error
    job = load_job("other.yaml")
    assert (job.spec.dataset.prompt, job.spec.dataset.completion) == ("{de}\n", "{en}")
    assert job.spec.training.epochs == 7
    assert "the row format cannot be told from the columns" in error
    assert "there is no column 'fr'" in error


def test_answers_that_are_missing_are_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(monkeypatch, "")
    code, error = refusal(capsys, write(QUESTIONS), "--model", "t5", "--interactive")
    assert code == 2
    assert "no answer to the question" in error
