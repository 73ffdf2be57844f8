"""`spotune predict`: the exported model is prompted as in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spotune.errors import JobError, UsageError
from spotune.job import FinetuneJob
from spotune.prompting.export_manifest import ExportManifest, find_export
from spotune_trainer.data.batches import collate
from spotune_trainer.data.rows.options import TextOptions
from spotune_trainer.data.rows.renderer import RowRenderer
from spotune_trainer.data.rows.tokenization import DocumentTokenizer
from spotune_trainer.export.huggingface import export_model
from spotune_trainer.export.predict import Predictor, parse_question, read_questions
from spotune_trainer.models.pretrained import build_model, load_tokenizer
from tests.command_line import run_spotune
from tests.trainer.support.tiny import make_job, save_source

PROMPT = "{schema} : {question}"
EXAMPLES = [
    {"schema": "singer", "question": "how many ?", "sql": "SELECT count(*) FROM singer"},
    {"schema": "band", "question": "which names ?", "sql": "SELECT name FROM band"},
]


def learn(job: FinetuneJob, directory: Path) -> Path:
    """Overfit the model to the examples, tokenized as by `spotune shard`, and export it."""
    task, dataset = job.spec.model.task, job.spec.dataset
    tokenizer, model = load_tokenizer(job), build_model(job)
    options = TextOptions(
        task=task, prompt=dataset.prompt, completion=dataset.completion, max_length=dataset.max_length
    )
    documents = [RowRenderer(options, tokenizer).render(example) for example in EXAMPLES]
    tokenized = DocumentTokenizer(options, tokenizer).tokenize(documents)
    batch = collate([{"input_ids": row.input_ids, "labels": row.labels} for row in tokenized], task, 0)
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    model.eval()
    for _ in range(120):
        optimizer.zero_grad()
        model(**batch.model_inputs()).loss.backward()
        optimizer.step()
    export_model({name: value.detach() for name, value in model.named_parameters()}, job, directory / "export", {})
    return directory


@pytest.fixture(scope="module", params=["seq2seq", "causal"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp(request.param)
    source = save_source(directory / "source", request.param)
    dataset = {"train": {"source": "/shards"}, "prompt": PROMPT, "completion": "{sql}", "maxLength": 64}
    return learn(make_job(source, request.param, dataset=dataset), directory)


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return run_spotune(capsys, "predict", *arguments)


def test_the_model_answers_what_it_learned(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, run, "how many ?", "--field", "schema=singer")
    assert (code, out) == (0, "SELECT count(*) FROM singer\n")


def test_fields_can_be_a_json_object(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question = json.dumps({"schema": "band", "question": "which names ?"})
    code, out, _ = call(capsys, run / "export", question, "--output", "json")
    assert code == 0
    assert json.loads(out) == {"prompt": "band : which names ?", "answer": "SELECT name FROM band"}


def test_a_file_is_answered_line_by_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*EXAMPLES, EXAMPLES[0]]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    code, out, _ = call(capsys, run, "--file", file)
    assert code == 0
    assert out.splitlines() == [row["sql"] for row in rows]


def test_the_answer_length_is_limited(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, run, "how many ?", "--field", "schema=singer", "--max-new-tokens", 3)
    assert code == 0
    assert out == "SELECT count(*)\n"


def test_batches_of_uneven_prompts_do_not_change_the_answers(run: Path) -> None:
    predictor = Predictor.load(run)
    prompts = ["singer : how many ?", "x " * 20, "band : which names ?", *["singer : how many ?"] * 9]
    answers = [answer.answer for answer in predictor.answer(prompts)]
    assert answers[0] == answers[-1] == EXAMPLES[0]["sql"]
    assert answers[2] == EXAMPLES[1]["sql"]
    assert len(answers) == len(prompts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["how many ?"],
            r"cannot be placed in the prompt '{schema} : {question}': pass --field schema=... --field question",
        ),
        (["--field", "schema=singer"], r"also needs question: pass --field question=..."),
        (["how many ?", "--field", "scheme=singer"], r"has no field 'scheme'; it has schema, question"),
        (["how?", "--field", "schema=a", "--field", "question=b"], r"omit the question"),
        (['{"schema": null, "question": "how many ?"}'], r"cannot be filled: column 'schema' is null"),
        (["how many ?", "--field", "schema"], r"--field schema: write NAME=VALUE"),
        ([], r"give either a question or --file with questions"),
        (["how many ?", "--file", "/none"], r"give either a question or --file with questions"),
        (["--file", "/none"], r"the questions in /none cannot be read"),
    ],
)
def test_invalid_questions_are_rejected_with_a_hint(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = call(capsys, run, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_directory_without_a_model_is_rejected_with_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, tmp_path / "none", "hello")
    assert code == 2
    assert "there is no directory" in err
    with pytest.raises(UsageError, match=r"is neither an exported model .* nor a job directory"):
        find_export(tmp_path)
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(UsageError, match=f"has no exported model yet.*spotune checkpoint export {tmp_path}"):
        find_export(tmp_path)


def test_a_damaged_export_is_rejected(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = (run / "export" / "spotune.json").read_text()
    (tmp_path / "spotune.json").write_text(manifest)
    code, _, err = call(capsys, tmp_path, "how many ?", "--field", "schema=singer", "--output", "json")
    assert code == 20
    assert json.loads(err)["message"].startswith("export: no model can be loaded from")
    (tmp_path / "spotune.json").write_text("{")
    with pytest.raises(JobError, match="damaged or of another version"):
        Predictor.load(tmp_path)


def predictor_of(tmp_path: Path, **manifest: Any) -> Predictor:
    """A predictor without a model, for tests of its prompts."""
    job = make_job(save_source(tmp_path, "causal"), "causal")
    values = {"name": "x", "task": "causal", "prompt": "", "messages": "", "max_length": 8, "max_new_tokens": 2}
    tokenizer = load_tokenizer(job)
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}<assistant>{% endif %}"
    return Predictor(ExportManifest(**{**values, **manifest}), build_model(job), tokenizer)


def test_a_chat_model_is_prompted_with_its_chat_template(tmp_path: Path) -> None:
    predictor = predictor_of(tmp_path, messages="messages")
    assert predictor.prompt("hello", {}) == "<user>hello<assistant>"
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    assert predictor.prompt("", {"messages": turns}) == "<system>be kind<user>hello<assistant>"
    assert len(list(predictor.answer(["<user>hello<assistant>"]))) == 1
    with pytest.raises(UsageError, match="a JSON object with a list of chat messages as 'messages'"):
        predictor.prompt("", {"turns": turns})
    predictor.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UsageError, match="cannot render the messages: roles must alternate"):
        predictor.prompt("hello", {})


def test_a_model_without_template_continues_the_text(tmp_path: Path) -> None:
    predictor = predictor_of(tmp_path)
    assert predictor.prompt("once upon", {}) == "once upon"
    with pytest.raises(UsageError, match="trained without a prompt template"):
        predictor.prompt("once upon", {"question": "x"})
    with pytest.raises(UsageError, match="the prompt is empty"):
        list(predictor.answer([""]))


def test_a_long_question_is_truncated_as_in_training(tmp_path: Path) -> None:
    job = make_job(save_source(tmp_path, "seq2seq"))
    manifest = ExportManifest("x", "seq2seq", "", "", max_length=5, max_new_tokens=2)
    predictor = Predictor(manifest, build_model(job), load_tokenizer(job))
    (ids,) = predictor._encode(["how many singers are there ? " * 9])
    assert len(ids) == 5
    assert ids[-1] == 1


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("how many ?", ("how many ?", {})),
        ('{"a": 1}', ("", {"a": 1})),
        ("{curly} question", ("{curly} question", {})),
        ("[1]", ("[1]", {})),
    ],
)
def test_only_a_json_object_is_parsed_as_fields(text: str, question: tuple[str, dict[str, Any]]) -> None:
    assert parse_question(text) == question


def test_question_files_are_plain_text_or_json_lines(tmp_path: Path) -> None:
    plain, lines = tmp_path / "questions.txt", tmp_path / "questions.jsonl"
    plain.write_text('how many ?\n\n{"a": 1}\n')
    lines.write_text('"how many ?"\n{"a": 1}\n')
    assert read_questions(plain) == read_questions(lines) == [("how many ?", {}), ("", {"a": 1})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n\n", "has no questions"),
        (b'"a"\nhow many ?\n', r"questions.jsonl:2 is not JSON.*name the file \*.txt"),
        (b"[1]\n", r"questions.jsonl:1 is \[1\]"),
        (b"\xff", "cannot be read"),
    ],
)
def test_a_broken_question_file_is_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_questions(file)
