"""`spotune init` on rows with labels of texts, words or answers, and on texts that belong together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from spotune.job import FinetuneJob
from tests.command_line import run_spotune
from tests.trainer.cli.init.support.commands import Row, ask, init, prepared, refusal, write
from tests.trainer.support.labelled import TAGS, TOPICS, save_model, sentences, texts

pytestmark = pytest.mark.usefixtures("workplace")

TOPIC_ROWS: list[Row] = list(texts(60))
WORD_ROWS: list[Row] = list(sentences(60))
NUMBERED_WORDS: list[Row] = [
    {"tokens": row["tokens"], "ner_tags": [TAGS.index(tag) for tag in row["tags"]]} for row in WORD_ROWS
]
ANSWERS: list[Row] = [{"question": f"How many {n}?", "answer": f"{n}", "liked": n % 3 > 0} for n in range(60)]
CHATS: list[Row] = [
    {
        "messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}],
        "label": row["liked"],
    }
    for row in ANSWERS
]
TRIPLETS: list[Row] = [
    {"anchor": f"Where is {n}?", "positive": f"{n} is here.", "negative": f"{n + 1} is there."} for n in range(60)
]
PAIRS: list[Row] = [{"query": row["anchor"], "positive": row["positive"]} for row in TRIPLETS]


@pytest.fixture(autouse=True)
def models(workplace: Path) -> None:
    """An encoder `bert`, and weights for all causal models. Only the name of the weights is looked at."""
    save_model(workplace / "bert", "bert")
    for name in ("bert", "llama", "chat"):
        (workplace / name / "model.safetensors").touch()


def comments() -> str:
    return " ".join(Path("job.yaml").read_text().replace("#", "").split())


@pytest.mark.parametrize("file", ["rows.jsonl", "rows.csv", "rows.parquet"])
@pytest.mark.parametrize("model", ["bert", "llama"])
def test_a_label_of_each_text_is_classified(model: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = init(capsys, write(TOPIC_ROWS, file), "--model", model)
    dataset = job.spec.dataset
    assert (dataset.text, dataset.label, dataset.labels) == ("{text}", "{label}", sorted(TOPICS))
    assert (job.spec.training.objective, job.spec.model.task, dataset.packing) == ("classification", "causal", False)
    counts = prepared(job)
    assert (counts["documents"], counts["truncated"], counts["dropped"]) == (60, 0, 0)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 1], ["0", "1"]),
        (["0", "1"], ["0", "1"]),
        ([0, 3], ["0", "1", "2", "3"]),
        ([5, 1, 10], ["1", "5", "10"]),
        ([True, False], ["false", "true"]),
        (["yes", "no", "off"], ["no", "off", "yes"]),
    ],
)
def test_values_of_a_column_become_labels(
    values: Sequence[object], labels: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"text {n}", "label": values[n % len(values)]} for n in range(30)]
    job = init(capsys, write(rows), "--model", "bert")
    assert job.spec.dataset.labels == labels
    assert prepared(job)["samples"] == 30


def test_several_texts_are_divided_as_the_tokenizer_does(capsys: pytest.CaptureFixture[str]) -> None:
    rows = write([{"premise": f"{n} sang", "hypothesis": f"{n} won", "label": n % 3} for n in range(30)])
    assert init(capsys, rows, "--model", "bert").spec.dataset.text == "{premise} [SEP] {hypothesis}"
    assert init(capsys, rows, "--model", "llama", "--force").spec.dataset.text == "{premise}\n{hypothesis}"


@pytest.mark.parametrize(("rows", "labels"), [
    (WORD_ROWS, ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]),
    (NUMBERED_WORDS, ["0", "1", "2", "3", "4"]),
])  # fmt: skip
@pytest.mark.parametrize("file", ["rows.jsonl", "rows.parquet"])
def test_a_label_of_each_word_is_classified(
    rows: list[Row], labels: list[str], file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = init(capsys, write(rows, file), "--model", "bert")
    assert job.spec.training.objective == "tokenClassification"
    assert (job.spec.dataset.text, job.spec.dataset.labels) == ("{tokens}", labels)
    assert prepared(job)["lossTokens"] == sum(len(row["tokens"]) for row in rows)


@pytest.mark.parametrize(("rows", "file", "model"), [
    (ANSWERS, "rows.jsonl", "llama"),
    (ANSWERS, "rows.csv", "llama"),
    (ANSWERS, "rows.parquet", "chat"),
    (CHATS, "rows.jsonl", "chat"),
])  # fmt: skip
def test_answers_with_a_label_are_learned_by_kto(
    rows: list[Row], file: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = init(capsys, write(rows, file), "--model", model)
    training = job.spec.training
    assert (training.objective, training.epochs, training.learning_rate) == ("kto", 1, 1e-6)
    assert training.global_batch_size == 16
    assert (training.preference.desirable_weight, training.preference.undesirable_weight) == (1.0, 2.0)
    assert "40 are, 20 are not" in comments()
    counts = prepared(job)
    assert (counts["documents"], counts["truncated"], counts["dropped"]) == (60, 0, 0)


def test_kinds_of_answers_of_about_the_same_number_have_no_weights(capsys: pytest.CaptureFixture[str]) -> None:
    job = init(capsys, write([row | {"liked": n % 2} for n, row in enumerate(ANSWERS)]), "--model", "llama")
    preference = job.spec.training.preference
    assert (preference.desirable_weight, preference.undesirable_weight) == (1.0, 1.0)


def test_answers_that_are_all_desirable_are_learned_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    job = init(capsys, write([row | {"liked": True} for row in ANSWERS]), "--model", "llama")
    assert (job.spec.training.objective, job.spec.dataset.label) == ("sft", "")


@pytest.mark.parametrize(("model", "pooling"), [("bert", "mean"), ("llama", "lastToken")])
@pytest.mark.parametrize(("rows", "query", "negative"), [(TRIPLETS, "{anchor}", "{negative}"), (PAIRS, "{query}", "")])
def test_texts_that_belong_together_become_embeddings(
    rows: list[Row], query: str, negative: str, model: str, pooling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = init(capsys, write(rows), "--model", model)
    dataset, training = job.spec.dataset, job.spec.training
    assert (dataset.query, dataset.positive, dataset.negative) == (query, "{positive}", negative)
    assert (training.objective, training.embedding.pooling, training.global_batch_size) == ("embedding", pooling, 32)
    assert (job.spec.adapter, training.learning_rate) == (None, 2e-5)
    counts = prepared(job)
    assert (counts["documents"], counts["truncated"], counts["dropped"]) == (60, 0, 0)


def test_a_negative_with_gaps_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row | {"negative": None if n == 7 else row["negative"]} for n, row in enumerate(TRIPLETS)]
    assert init(capsys, write(rows), "--model", "llama").spec.dataset.negative == ""
    assert "'negative' is left out: it has no text in some rows" in comments()


FORMATS = [(TOPIC_ROWS, "bert"), (WORD_ROWS, "bert"), (ANSWERS, "llama"), (CHATS, "chat"), (TRIPLETS, "bert")]


@pytest.mark.parametrize(("rows", "model"), FORMATS)
def test_validate_plan_and_show_take_the_file(rows: list[Row], model: str, capsys: pytest.CaptureFixture[str]) -> None:
    init(capsys, write(rows), "--model", model)
    for words in (["validate", "job.yaml"], ["plan", "job.yaml"], ["data", "show", "1", "--job", "job.yaml"]):
        code, out, error = run_spotune(capsys, *words)
        assert (code, error) == (0, ""), words
        assert out
        assert words[0] != "validate" or "all 60 rows checked" in out


@pytest.mark.parametrize(("rows", "model"), FORMATS)
def test_defaults_of_the_questions_are_the_decisions(
    rows: list[Row], model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = init(capsys, write(rows), "--model", model)
    Path("job.yaml").unlink()
    ask(monkeypatch, *[""] * 8)
    assert init(capsys, "rows.jsonl", "--model", model, "--interactive") == decided


RENAMED: list[Row] = [{"review": f"{n} of 9", "verdict": "good" if n % 2 else "bad"} for n in range(30)]


def classified(job: FinetuneJob) -> tuple[str, str, list[str]]:
    dataset = job.spec.dataset
    return dataset.text, dataset.label, dataset.labels


def test_options_name_text_and_label(capsys: pytest.CaptureFixture[str]) -> None:
    rows = write(RENAMED)
    for label in ("verdict", "{verdict}"):
        job = init(capsys, rows, "--model", "bert", "--text", "Review: {review}", "--label", label, "--force")
        assert classified(job) == ("Review: {review}", "{verdict}", ["bad", "good"])


def test_answers_name_text_and_label(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, "label", "", "{rview}", "{review}", "verdict", "", "")
    job = init(capsys, write(RENAMED), "--model", "bert", "--interactive")
    assert classified(job) == ("{review}", "{verdict}", ["bad", "good"])


def test_options_name_texts_that_belong_together(capsys: pytest.CaptureFixture[str]) -> None:
    rows = write([{"a": row["anchor"], "b": row["positive"]} for row in TRIPLETS])
    dataset = init(capsys, rows, "--model", "bert", "--query", "query: {a}", "--positive", "{b}").spec.dataset
    assert (dataset.query, dataset.positive) == ("query: {a}", "{b}")


def test_options_name_answers_and_whether_they_are_desirable(capsys: pytest.CaptureFixture[str]) -> None:
    rows = write([{"q": row["question"], "a": row["answer"], "up": int(row["liked"])} for row in ANSWERS])
    words = ["--prompt", "{q}\n", "--completion", "{a}", "--label", "up"]
    job = init(capsys, rows, "--model", "llama", *words)
    assert (job.spec.training.objective, job.spec.dataset.label) == ("kto", "{up}")


@pytest.mark.parametrize(("rows", "model", "options"), [
    (ANSWERS, "llama", ["--prompt", "{question}", "--completion", "{answer}"]),
    (CHATS, "chat", ["--messages", "messages"]),
])  # fmt: skip
def test_options_without_a_label_learn_all_answers(
    rows: list[Row], model: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    job = init(capsys, write(rows), "--model", model, *options)
    assert (job.spec.training.objective, job.spec.dataset.label) == ("sft", "")


def test_options_let_the_model_write_the_label(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt", "{text}\n", "--completion", "{label}"]
    assert init(capsys, write(TOPIC_ROWS), "--model", "llama", *words).spec.training.objective == "sft"


def test_the_format_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for rows, model, name in (
        (TOPIC_ROWS, "bert", "texts with a label"),
        (WORD_ROWS, "bert", "words with labels"),
        (ANSWERS, "llama", "answers with a label"),
        (TRIPLETS, "llama", "texts that belong together"),
    ):
        words = ["init", write(rows), "--model", model, "--force", "--output", "json"]
        assert json.loads(run_spotune(capsys, *words)[1])["data"]["format"] == name


def test_columns_that_are_not_used_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    init(capsys, write([row | {"id": n} for n, row in enumerate(TOPIC_ROWS)]), "--model", "bert")
    assert "not used are id." in comments()


@pytest.mark.parametrize(("rows", "model", "options", "message"), [
    (TOPIC_ROWS, "bert", ["--prompt", "{text}", "--completion", "{label}"], "an encoder, which generates no text"),
    ([{"text": "a"}], "bert", [], "the columns have no labels or embeddings that are known: 'text' (text)"),
    (ANSWERS, "llama", ["--text", "{question}", "--label", "answer", "--prompt", "x"], "give only one of"),
    (ANSWERS, "llama", ["--label", "liked"], "--label needs the text that it is of"),
    (ANSWERS, "llama", ["--query", "{question}"], "--query and --positive have to be given together"),
    (ANSWERS, "llama", ["--negative", "{question}"], "--negative needs --query and --positive"),
    (ANSWERS, "llama", ["--text", "{question}", "--label", "gone"], "there is no column 'gone'"),
    ([{"t": str(n), "l": str(n)} for n in range(300)], "bert", ["--text", "t", "--label", "l"],
     "column 'l' has too many different values"),
    ([{"t": str(n), "l": "x"} for n in range(3)], "bert", ["--text", "t", "--label", "l"], "less than two different"),
    ([{"text": str(n), "label": n % 3 - 1} for n in range(30)], "bert", [], "'label' is -1 in some rows"),
    ([row | {"liked": "maybe"} for row in ANSWERS], "llama",
     ["--prompt", "{question}", "--completion", "{answer}", "--label", "liked"], "does not say by true or false"),
    (WORD_ROWS, "bert", ["--text", "a {tokens}", "--label", "tags"], "labelled one by one: name it alone"),
    ([{"tokens": ["a"], "l": "O"}], "bert", ["--text", "tokens", "--label", "l"], "'l' has no lists with their labels"),
    ([*WORD_ROWS, {"tokens": ["a", "b"], "tags": ["O"]}], "bert", [], "rows.jsonl:61: 'tokens' has 2 words"),
    (ANSWERS, "t5", [], "which only causal models learn (objective kto)"),
    (ANSWERS, "t5", ["--prompt", "{question}", "--completion", "{answer}", "--label", "liked"],
     "--label: seq2seq models learn completions only"),
    (TRIPLETS, "t5", ["--query", "{anchor}", "--positive", "{positive}"], "--query: seq2seq models learn completions"),
])  # fmt: skip
def test_rows_that_cannot_be_learned_are_refused_with_the_fix(
    rows: list[Row], model: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, write(rows), "--model", model, *options)[1]


def test_kto_needs_a_model_that_answers(capsys: pytest.CaptureFixture[str]) -> None:
    Path("llama/model.safetensors").unlink()
    assert "name a model with weights" in refusal(capsys, write(ANSWERS), "--model", "llama")[1]


def test_a_head_for_another_number_of_labels_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads(Path("bert/config.json").read_text())
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "bad", "1": "good"}}
    Path("bert/config.json").write_text(json.dumps(config))
    assert "dataset.labels has 3 labels, and the head" in refusal(capsys, write(TOPIC_ROWS), "--model", "bert")[1]


def test_lengths_stay_within_the_positions_of_an_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*TOPIC_ROWS, *({"text": "song " * 200, "label": "music"} for _ in range(5))]
    assert init(capsys, write(rows), "--model", "bert").spec.dataset.max_length == 64
