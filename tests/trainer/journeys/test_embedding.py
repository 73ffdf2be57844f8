"""Embeddings: their losses equal those of sentence-transformers at any world size, and a resumed run is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.export.predict import Predictor
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.embedding import Kind, embedding_job, embedding_rows, save_embedding_source
from tests.trainer.support.groups import GroupFailedError
from tests.trainer.support.preference import BATCH, STEPS
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

pytestmark = pytest.mark.slow

REFERENCE = Path("benchmarks/results/sentence_transformers_embedding.json")
EXPECTED = json.loads(REFERENCE.read_text(encoding="utf-8"))["losses"]
JOBS: dict[str, dict[str, Any]] = {
    "encoder": {"kind": "encoder"},
    "encoder-negatives": {"kind": "encoder", "negatives": True},
    "decoder": {"kind": "decoder"},
}
HALF = STEPS // 2


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *at_all_layouts("encoder", quick=[Layout(1, 0)]),
        *at_all_layouts("encoder-negatives", quick=[Layout(2, 3)]),
        *at_all_layouts("decoder"),
    ],
    ids=str,
)
def test_losses_match_sentence_transformers(tmp_path: Path, name: str, layout: Layout) -> None:
    job = embedding_job(tmp_path, **JOBS[name])
    directory = JobDirectory(tmp_path / "run")
    train_generation(directory, job, layout)
    assert losses(directory) == pytest.approx(EXPECTED[name], rel=1e-4)
    assert losses(directory)[-1] < 0.9 * losses(directory)[0], "the weights moved far enough for a difference to show"


def test_the_loss_is_that_of_the_whole_step_with_a_rank_that_has_no_samples(tmp_path: Path, runs: Runs) -> None:
    directory = runs.empty("idle")
    train_generation(directory, embedding_job(tmp_path), Layout(2, 3), micro_batch_size=BATCH)
    assert losses(directory) == pytest.approx(EXPECTED["encoder"], rel=1e-4)


@pytest.mark.long
def test_dropout_is_the_same_in_both_passes_and_at_any_world_size(tmp_path: Path, runs: Runs) -> None:
    job = embedding_job(tmp_path, dropout=0.1)
    found = []
    for layout in (Layout(1, 0), Layout(2, 2)):
        directory = runs.empty(f"dropout-{layout.world_size}")
        train_generation(directory, job, layout)
        found.append(losses(directory))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0] != pytest.approx(EXPECTED["encoder"], rel=1e-3), "there was dropout"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("encoder", Layout(2, 1)),
        pytest.param("encoder-negatives", Layout(2, 2), marks=pytest.mark.long),
        pytest.param("decoder", Layout(2, 1), marks=pytest.mark.long),
        pytest.param("decoder", Layout(2, 3), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_run_resumes_exactly(tmp_path: Path, runs: Runs, name: str, layout: Layout) -> None:
    job = embedding_job(tmp_path, **JOBS[name], dropout=0.1, checkpoint={"every": HALF, "keep": 3})
    undisturbed = runs.empty("finished-embedding")
    train_generation(undisturbed, job, layout)
    resumed = runs.interrupted(undisturbed, HALF)
    train_generation(resumed, job, layout)
    expected, found = committed_state(undisturbed, STEPS), committed_state(resumed, STEPS)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert losses(resumed) == losses(undisturbed)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("encoder", Layout(2, 1), Layout(3, 2)),
        ("encoder-negatives", Layout(2, 3), Layout(1, 0)),
        ("decoder", Layout(1, 0), Layout(2, 3)),
    ],
    ids=str,
)
def test_a_run_resumes_at_another_world_size(
    tmp_path: Path, runs: Runs, name: str, before: Layout, after: Layout
) -> None:
    job = embedding_job(tmp_path, **JOBS[name], dropout=0.1, checkpoint={"every": HALF, "keep": 3})
    resumed, undisturbed = resumed_at_another_layout(runs, job, before, after, HALF)
    assert sample_hashes(resumed) == sample_hashes(undisturbed)
    assert losses(resumed) == pytest.approx(losses(undisturbed), rel=1e-5)


def test_steps_and_evaluations_report_how_well_texts_are_found(tmp_path: Path, runs: Runs) -> None:
    job = embedding_job(tmp_path, dataset={"eval": {"fraction": 0.25}}, training={"evaluation": {"everySteps": HALF}})
    found = []
    for layout in (Layout(1, 0), Layout(2, 3)):
        directory = runs.empty(f"evaluated-{layout.world_size}")
        summary = train_generation(directory, job, layout).summary
        first, *_, last = surviving_steps(directory)
        assert 0 < first["mrr"] < last["mrr"] <= 1
        assert first["accuracyAt1"] <= last["accuracyAt1"]
        found.append({"loss": summary["evalLoss"], **summary["scores"]})
    assert found[0].keys() == {"loss", "accuracyAt1", "mrr"}
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("kind", ["encoder", pytest.param("decoder", marks=pytest.mark.long)])
def test_the_export_finds_texts_as_the_engine_did(tmp_path: Path, runs: Runs, kind: Kind) -> None:
    source = save_embedding_source(tmp_path / "model", kind)
    auto: Any = AutoModelForMaskedLM if kind == "encoder" else AutoModelForCausalLM
    auto.from_config(AutoConfig.from_pretrained(source)).save_pretrained(source)  # with a head, and without a pooler
    templates = {
        "query": "query: {query}",
        "positive": "text: {positive}",
        "eval": {"source": str(tmp_path / "shards")},
    }
    model = {"source": str(source), "task": "causal", "dtype": "float32", "initialise": "pretrained"}
    job = embedding_job(tmp_path, kind, negatives=True, dataset=templates, model=model, execution={"flopsProfile": 2})
    directory = runs.empty(f"exported-{kind}")
    scores = train_generation(directory, job, Layout(2, 3)).summary["scores"]
    exported = AutoModel.from_pretrained(directory.export).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory.export)
    rows = embedding_rows()
    queries = embedded(exported, tokenizer, kind, [f"query: {row['query']}" for row in rows])
    texts = [*(f"text: {row['positive']}" for row in rows), *(row["negative"] for row in rows)]
    similarities = queries @ embedded(exported, tokenizer, kind, texts).T
    ranks = (similarities > similarities.diagonal().unsqueeze(1)).sum(1) + 1
    assert scores["accuracyAt1"] == pytest.approx(float((ranks == 1).double().mean()), abs=1 / len(rows))
    assert scores["mrr"] == pytest.approx(float((1 / ranks).double().mean()), abs=1 / len(rows))
    names_its_modules(directory, kind)


def embedded(model: Any, tokenizer: Any, kind: Kind, texts: list[str]) -> torch.Tensor:
    """Embeddings of texts by transformers, each text alone, ``[texts, hidden size]``."""
    with torch.no_grad():
        inputs = [tokenizer(text, truncation=True, max_length=48, return_tensors="pt") for text in texts]
        outputs = [model(**each).last_hidden_state[0] for each in inputs]
    pooled = [hidden.mean(0) if kind == "encoder" else hidden[-1] for hidden in outputs]
    return functional.normalize(torch.stack(pooled), dim=1)


def names_its_modules(directory: JobDirectory, kind: Kind) -> None:
    """Check the files that sentence-transformers reads, and the error of `spotune predict`."""

    def read(name: str) -> Any:
        return json.loads((directory.export / name).read_text())

    assert [module["type"].split(".")[-1] for module in read("modules.json")] == ["Transformer", "Pooling", "Normalize"]
    assert all((directory.export / module["path"]).is_dir() for module in read("modules.json"))
    pooling = read("1_Pooling/config.json")
    assert pooling["word_embedding_dimension"] == 16
    assert [mode for mode, used in pooling.items() if used is True] == [
        "pooling_mode_mean_tokens" if kind == "encoder" else "pooling_mode_lasttoken"
    ]
    assert read("config_sentence_transformers.json")["prompts"] == {"query": "query: ", "document": "text: "}
    assert read("spotune.json")["task"] == "embedding"
    assert "SentenceTransformer(directory)" in (directory.export / "README.md").read_text()
    with pytest.raises(JobError, match="is a model with embeddings"):
        Predictor.load(directory.root)


@pytest.mark.parametrize(
    ("objective", "shards_of", "message"),
    [
        ("embedding", "causal", "embedding learns from texts that are near to each other, and .* has none"),
        ("sft", "texts", "has texts without an answer, which only embedding learns from"),
    ],
)
def test_shards_that_do_not_fit_the_objective_are_refused(
    tmp_path: Path, runs: Runs, objective: str, shards_of: str, message: str
) -> None:
    job = embedding_job(tmp_path, "decoder").model_dump(mode="json", exclude_none=True)
    source = runs.shards("causal") if shards_of == "causal" else tmp_path / "shards"
    job["spec"]["dataset"] = {"train": {"source": str(source)}}
    embedding = job["spec"]["training"].pop("embedding") if objective == "embedding" else {}
    job["spec"]["training"] |= {"objective": objective, "embedding": embedding}
    with pytest.raises(GroupFailedError, match=message):
        train_generation(runs.empty("refused"), FinetuneJob.model_validate(job), Layout(1, 0))
