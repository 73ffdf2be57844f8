"""Classifiers of texts and of words: losses equal those of transformers' Trainer, and a resumed run is exact.

Their exports work in transformers' pipelines and in `spotune predict`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import pipeline

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.export.predict import Predictor
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.models.pretrained import build_model
from tests.command_line import run_spotune
from tests.trainer.support.groups import GroupFailedError
from tests.trainer.support.labelled import (
    STEPS,
    TOPICS,
    labelled_job,
    save_wordpiece_tokenizer,
    sentences,
    texts,
)
from tests.trainer.support.plain_trainer import trainer_losses
from tests.trainer.support.preference import preference_job
from tests.trainer.support.runs import (
    Layout,
    Runs,
    at_all_layouts,
    committed_state,
    losses,
    resumed_at_another_layout,
    sample_hashes,
    train_generation,
)
from tests.trainer.support.tiny import save_config

pytestmark = pytest.mark.slow

HALF = STEPS // 2
LONG = pytest.mark.long
ADAPTER = {"lora": {"r": 4}}


@pytest.mark.parametrize(
    ("objective", "model_type", "layout"),
    [
        *at_all_layouts("classification", "bert", quick=[Layout(2, 3)]),
        *at_all_layouts("classification", "llama"),
        *at_all_layouts("tokenClassification", "bert", quick=[Layout(1, 0)]),
        *at_all_layouts("tokenClassification", "llama"),
    ],
    ids=str,
)
def test_losses_match_those_of_the_trainer(tmp_path: Path, objective: str, model_type: str, layout: Layout) -> None:
    if (objective, model_type) == ("tokenClassification", "llama"):
        save_llama_for_words(tmp_path / "model")
    job = labelled_job(tmp_path, objective, model_type, training={"labelSmoothing": 0.1})
    directory = JobDirectory(tmp_path / "run")
    train_generation(directory, job, layout)
    assert losses(directory) == pytest.approx(trainer_losses(job, tmp_path), rel=1e-4)
    assert losses(directory)[-1] < 0.8 * losses(directory)[0], "the weights moved far enough for a difference to show"


@pytest.mark.parametrize(
    ("objective", "model_type", "adapter", "layout"),
    [
        ("classification", "bert", ADAPTER, Layout(2, 1)),
        pytest.param("classification", "llama", None, Layout(2, 2), marks=LONG),
        pytest.param("classification", "llama", ADAPTER, Layout(2, 3), marks=LONG),
        pytest.param("tokenClassification", "bert", None, Layout(2, 3), marks=LONG),
        pytest.param("tokenClassification", "llama", ADAPTER, Layout(1, 0), marks=LONG),
    ],
    ids=str,
)
def test_a_run_resumes_exactly(
    tmp_path: Path, runs: Runs, objective: str, model_type: str, adapter: dict[str, Any] | None, layout: Layout
) -> None:
    sections: dict[str, Any] = {"adapter": adapter} if adapter else {}
    job = labelled_job(tmp_path, objective, model_type, checkpoint={"every": HALF, "keep": 3}, **sections)
    undisturbed = runs.empty("finished-labelled")
    train_generation(undisturbed, job, layout)
    resumed_exactly(runs, undisturbed, job, layout)
    if adapter:
        head_is_trained(undisturbed, job)


@pytest.mark.long
@pytest.mark.parametrize(
    ("objective", "before", "after"),
    [
        ("classification", Layout(2, 1), Layout(3, 2)),
        ("tokenClassification", Layout(2, 3), Layout(1, 0)),
    ],
    ids=str,
)
def test_a_run_resumes_at_another_world_size(
    tmp_path: Path, runs: Runs, objective: str, before: Layout, after: Layout
) -> None:
    job = labelled_job(tmp_path, objective, dropout=0.1, checkpoint={"every": HALF, "keep": 3})
    resumed, undisturbed = resumed_at_another_layout(runs, job, before, after, HALF)
    assert sample_hashes(resumed) == sample_hashes(undisturbed)
    assert losses(resumed) == pytest.approx(losses(undisturbed), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(2, 3)], ids=str)
def test_a_reward_model_with_an_adapter_resumes_exactly(tmp_path: Path, runs: Runs, layout: Layout) -> None:
    job = preference_job(tmp_path, "reward", checkpoint={"every": HALF, "keep": 3}, adapter=ADAPTER)
    undisturbed = runs.empty("finished-reward-adapter")
    train_generation(undisturbed, job, layout)
    resumed_exactly(runs, undisturbed, job, layout)
    head_is_trained(undisturbed, job)


def test_the_export_of_a_classifier_of_texts(tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = {"everySteps": HALF, "best": {"metric": "macroF1"}}
    dataset = {"eval": {"source": str(tmp_path / "shards")}}
    job = labelled_job(tmp_path, dataset=dataset, training={"evaluation": evaluation})
    directory = runs.empty("exported-classifier")
    result = train_generation(directory, job, Layout(2, 2))
    scores = result.summary["scores"]
    assert scores["accuracy"] > 0.9
    assert scores["macroF1"] > 0.9
    assert result.summary["best"]["metric"] == "macroF1"
    first, *_, last = surviving_steps(directory)
    assert last["accuracy"] > first["accuracy"]

    rows = texts()
    classify: Any = pipeline("text-classification", str(directory.export), device="cpu")
    found = classify([row["text"] for row in rows], batch_size=8)
    correct = sum(each["label"] == row["label"] for each, row in zip(found, rows, strict=True))
    assert correct / len(rows) == pytest.approx(scores["accuracy"])
    assert classify.model.config.label2id == {name: position for position, name in enumerate(TOPICS)}

    text = rows[0]["text"]
    code, printed, _ = run_spotune(capsys, "predict", str(directory.root), text)
    assert code == 0
    assert printed.split(maxsplit=2) == [found[0]["label"], f"{found[0]['score']:.4f}", f"{text}\n"]
    question = tmp_path / "questions.jsonl"
    question.write_text(json.dumps({"text": text}) + "\n")
    _, printed, _ = run_spotune(capsys, "predict", str(directory.root), "--file", str(question), "--output", "json")
    answer = json.loads(printed)
    assert (answer["text"], answer["label"]) == (text, found[0]["label"])
    assert answer["score"] == pytest.approx(found[0]["score"], abs=1e-6)

    card = (directory.export / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert 'pipeline("text-classification", directory)' in card
    with pytest.raises(JobError, match=r"is a classifier .*generates no text"):
        Predictor.load(directory.root)


@pytest.mark.long
def test_the_export_of_a_classifier_of_tokens(tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = {"eval": {"source": str(tmp_path / "shards")}}
    job = labelled_job(tmp_path, "tokenClassification", dataset=dataset)
    directory = runs.empty("exported-word-classifier")
    scores = train_generation(directory, job, Layout(1, 0)).summary["scores"]
    assert scores["accuracy"] > 0.9
    assert scores["entityF1"] > 0.9

    row = sentences()[1]
    text = " ".join(row["tokens"])
    find: Any = pipeline("token-classification", str(directory.export), aggregation_strategy="first", device="cpu")
    entities = [(each["entity_group"], each["word"]) for each in find(text)]
    assert ("PER", "Bob Miller") in entities
    _, printed, _ = run_spotune(capsys, "predict", str(directory.root), text, "--output", "json")
    words = json.loads(printed)["words"]
    assert [word["text"] for word in words] == row["tokens"]
    assert [word["label"] for word in words] == row["tags"]
    question = json.dumps({"tokens": row["tokens"]})
    _, printed, _ = run_spotune(capsys, "predict", str(directory.root), question)
    assert [line.split()[::2] for line in printed.splitlines()[:-1]] == [
        list(pair) for pair in zip(row["tags"], row["tokens"], strict=True)
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": list(reversed(TOPICS))}, r"dataset.labels: the shards .* with the labels music, sport, weather"),
        ({"labels": [], "label": "", "text": ""}, "has labels, which sft does not learn: use classification"),
    ],
)
def test_shards_with_other_labels_are_refused(tmp_path: Path, runs: Runs, change: dict[str, Any], message: str) -> None:
    job = labelled_job(tmp_path).model_dump(mode="json", exclude_none=True)
    job["spec"]["dataset"] |= change
    if not change["labels"]:
        job["spec"]["training"]["objective"] = "sft"
        job["spec"]["model"]["source"] = str(runs.root / "none")
    with pytest.raises(GroupFailedError, match=message):
        train_generation(runs.empty("refused"), FinetuneJob.model_validate(job), Layout(1, 0))


def save_llama_for_words(folder: Path) -> None:
    """Save a Llama without dropout before its head, and with a tokenizer that has no spaces in its tokens.

    Given words one by one, as in transformers' example, a byte-level tokenizer leaves out the spaces of the text.
    """
    save_config(folder, "causal", attention_dropout=0.0, classifier_dropout=0.0)
    save_wordpiece_tokenizer(folder)


def resumed_exactly(runs: Runs, undisturbed: JobDirectory, job: FinetuneJob, layout: Layout) -> None:
    """Check that a copy of a run that is interrupted after half of its steps ends with the same bits."""
    resumed = runs.interrupted(undisturbed, HALF)
    train_generation(resumed, job, layout)
    expected, found = committed_state(undisturbed, STEPS), committed_state(resumed, STEPS)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert losses(resumed) == losses(undisturbed)
    assert (resumed.export / "model.safetensors").read_bytes() == (
        undisturbed.export / "model.safetensors"
    ).read_bytes()


def head_is_trained(directory: JobDirectory, job: FinetuneJob) -> None:
    """Check that a run with an adapter has trained the head, exports it, and has kept the other weights frozen."""
    from spotune_trainer.models.heads import head_modules
    from spotune_trainer.models.pretrained import load_exported

    before = build_model(job)
    exported, _ = load_exported(directory.export, job.spec.model_kind)
    first, last = before.state_dict(), exported.state_dict()
    assert first.keys() == last.keys()
    for head in head_modules(before):
        changed = [name for name in first if name.startswith(f"{head}.") and not torch.equal(first[name], last[name])]
        assert f"{head}.weight" in changed or f"{head}.dense.weight" in changed
    embeddings = next(name for name in first if "embed_tokens" in name or "word_embeddings" in name)
    assert torch.equal(first[embeddings], last[embeddings])
    assert not any("embed" in name for name in committed_state(directory, STEPS))
