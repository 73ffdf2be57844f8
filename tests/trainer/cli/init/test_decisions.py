"""Decisions are functions of the profiles, and every set of choices is a valid job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spotune.errors import JobError, UsageError
from spotune.job import FinetuneJob
from spotune.job_file.load import parse_job
from spotune.job_file.yaml_file import Document
from spotune.plan.config_reader import read_architecture
from spotune.plan.known_models import KNOWN_CONFIGS
from spotune_trainer.cli.init.decisions import (
    decide_adapter,
    decide_dataset,
    decide_model,
    held_out_rows,
    name_of,
)
from spotune_trainer.cli.init.fit import Training
from spotune_trainer.cli.init.formats.answers import Task
from spotune_trainer.cli.init.formats.profile import ColumnProfile, RowFormat
from spotune_trainer.cli.init.hyperparameters import decide_epochs, decide_training
from spotune_trainer.cli.init.job_file import content_of
from spotune_trainer.cli.init.lengths import max_length, packed_length, percentile, rows_cut
from spotune_trainer.cli.init.machine import find_machine
from spotune_trainer.cli.init.profiles import Choice, DataProfile, MachineProfile, ModelProfile

GPUS = MachineProfile(8, 80 * 10**9, "a100-80gb")
CPU = MachineProfile(0, 16 * 10**9, "this machine")
MODEL = ModelProfile(
    source="hf://meta-llama/Llama-3.1-8B",
    tokenizer="",
    task="causal",
    model_type="llama",
    parameters=8_030_261_248,
    architecture=read_architecture(KNOWN_CONFIGS["meta-llama/llama-3.1-8b"]),
    max_positions=131_072,
    has_weights=True,
    has_chat_template=False,
)
QUESTIONS = RowFormat(prompt="{question}", completion="{answer}")
PREFERENCES = RowFormat(prompt="{question}", chosen="{better}", rejected="{worse}")
PREFERRED_CHATS = RowFormat(chosen="{better}", rejected="{worse}")
TEXT_LABELS = RowFormat(text="{text}", label="{label}", labels=("no", "yes"))
WORD_LABELS = RowFormat(text="{tokens}", label="{label}", labels=("O", "B-X"), label_each_word=True)
JUDGED = RowFormat(prompt="{question}", completion="{answer}", label="{label}")
RELATED = RowFormat(query="{anchor}", positive="{positive}", negative="{negative}")
LABEL_COLUMN = ColumnProfile("label", 30, 0, {"boolean": 30}, "", {}, {"true": 20, "false": 10})
ENCODER_CONFIG = {"model_type": "bert", "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12,
                  "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 512}  # fmt: skip
ENCODER = replace(
    MODEL,
    source="hf://google-bert/bert-base-uncased",
    model_type="bert",
    parameters=109_482_240,
    architecture=read_architecture(ENCODER_CONFIG),
    max_positions=512,
    is_encoder=True,
)
LENGTHS = st.dictionaries(st.integers(1, 5000), st.integers(1, 1000), min_size=1)


def data(rows: int, row_format: RowFormat = QUESTIONS, lengths: Mapping[int, int] | None = None) -> DataProfile:
    columns = (LABEL_COLUMN,) if row_format.label else ()
    return DataProfile("rows.jsonl", rows, columns, row_format, rows, 0, lengths or {100: rows}, None)


def job(
    profile: DataProfile,
    model: ModelProfile = MODEL,
    machine: MachineProfile = GPUS,
    training: Training = "full",
    epochs: int | None = None,
) -> FinetuneJob:
    """The job of all choices but those of the memory plan."""
    choices = [
        Choice("metadata.name", "job"),
        *decide_model(model, machine),
        *decide_adapter(model, training),
        *decide_dataset(profile, model, 0),
        *decide_training(profile, model, machine, training, epochs),
        Choice("spec.workers.count", machine.workers),
    ]
    return parse_job(Document(content_of(choices)))


@given(LENGTHS, st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
def test_percentiles_are_those_of_numpy(lengths: dict[int, int], share: float) -> None:
    all_lengths = list(Counter(lengths).elements())
    assert percentile(lengths, share) == np.percentile(all_lengths, 100 * share, method="inverted_cdf")


@given(LENGTHS)
def test_at_most_one_percent_of_the_rows_is_cut(lengths: dict[int, int]) -> None:
    limit = max_length(lengths, None)
    assert rows_cut(lengths, limit) <= sum(lengths.values()) / 100
    assert limit <= max(1.25 * max(lengths), max(lengths) + 256)
    assert max_length(lengths, 64) <= 64


def test_a_few_outliers_do_not_decide_the_length() -> None:
    assert max_length({100: 990, 110: 9, 5000: 1}, None) == 112
    assert max_length({100: 99, 120: 1}, None) == 128


def test_packed_rows_are_short_enough_for_many_of_them() -> None:
    assert packed_length({1000: 100_000}, None) == 2048
    assert packed_length({1000: 100_000}, 1000) == 512
    assert packed_length({100: 10}, None) == 128
    assert packed_length({100: 10}, 64) == 64


@pytest.mark.parametrize(("rows", "epochs"), [(10, 3), (50_000, 3), (50_001, 2), (200_000, 2), (10**7, 1)])
def test_fewer_rows_get_more_epochs(rows: int, epochs: int) -> None:
    assert decide_epochs(rows, "sft") == epochs


@pytest.mark.parametrize(("rows", "batch"), [(5, 5), (500, 8), (5_000, 32), (10**6, 64)])
def test_small_datasets_get_small_batches(rows: int, batch: int) -> None:
    assert job(data(rows)).spec.training.global_batch_size == batch


def test_every_worker_gets_a_row_of_each_step() -> None:
    many = replace(GPUS, gpus=100)
    assert job(data(10_000), machine=many).spec.training.global_batch_size == 100


@pytest.mark.parametrize(
    ("rows", "held_out"), [(1, 0), (19, 0), (20, 1), (1_000, 50), (100_000, 1_000), (10**6, 1_000)]
)
def test_rows_are_held_out_if_there_are_enough(rows: int, held_out: int) -> None:
    assert held_out_rows(data(rows), MODEL) == held_out
    dataset = job(data(rows)).spec.dataset
    assert (dataset.eval is None) == (held_out == 0)
    assert (job(data(rows)).spec.training.evaluation.every_steps > 0) == (held_out > 0)


@pytest.mark.parametrize(
    ("changes", "training", "rate"),
    [
        ({}, "full", 2e-5),
        ({"parameters": 10**8}, "full", 5e-5),
        ({"task": "seq2seq"}, "full", 1e-4),
        ({}, "lora", 2e-4),
        ({"has_weights": False}, "full", 6e-4),
    ],
)
def test_the_learning_rate_is_that_of_the_method(changes: dict[str, Any], training: Training, rate: float) -> None:
    assert job(data(1000), replace(MODEL, **changes), training=training).spec.training.learning_rate == rate


@pytest.mark.parametrize(
    ("machine", "task", "dtype"),
    [
        (CPU, "causal", "float32"),
        (GPUS, "causal", "bfloat16"),
        (replace(GPUS, bfloat16=False), "causal", "float16"),
        (replace(GPUS, bfloat16=False), "seq2seq", "float32"),
    ],
)
def test_the_precision_is_one_that_the_device_has(machine: MachineProfile, task: Task, dtype: str) -> None:
    assert job(data(100), replace(MODEL, task=task), machine).spec.model.dtype == dtype


@pytest.mark.parametrize("row_format", [QUESTIONS, PREFERENCES])
def test_given_epochs_are_kept(row_format: RowFormat) -> None:
    assert job(data(100, row_format), epochs=9).spec.training.epochs == 9


@pytest.mark.parametrize(
    ("changes", "training", "objective", "rate", "epochs"),
    [
        ({}, "full", "dpo", 5e-7, 1),
        ({"parameters": 10**8}, "full", "dpo", 1e-6, 1),
        ({}, "lora", "dpo", 5e-6, 1),
        ({}, "qlora", "dpo", 5e-6, 1),
        ({"has_weights": False}, "full", "orpo", 6e-4, 3),
    ],
)
def test_preferences_are_learned_slowly_and_once_by_a_model_that_answers(
    changes: dict[str, Any], training: Training, objective: str, rate: float, epochs: int
) -> None:
    found = job(data(1000, PREFERENCES), replace(MODEL, **changes), training=training).spec.training
    assert (found.objective, found.learning_rate, found.epochs) == (objective, rate, epochs)
    assert found.preference.beta == (0.1 if objective == "dpo" else None)


@pytest.mark.parametrize(
    ("row_format", "model", "training", "objective", "rate", "epochs", "batch"),
    [
        (TEXT_LABELS, ENCODER, "full", "classification", 2e-5, 3, 32),
        (WORD_LABELS, ENCODER, "full", "tokenClassification", 2e-5, 3, 32),
        (TEXT_LABELS, MODEL, "lora", "classification", 2e-4, 3, 32),
        (JUDGED, MODEL, "full", "kto", 5e-7, 1, 64),
        (JUDGED, replace(MODEL, parameters=10**8), "full", "kto", 1e-6, 1, 64),
        (JUDGED, MODEL, "qlora", "kto", 5e-6, 1, 64),
        (RELATED, ENCODER, "full", "embedding", 2e-5, 1, 128),
        (RELATED, MODEL, "full", "embedding", 2e-5, 1, 128),
    ],
)
def test_each_objective_has_its_hyperparameters(
    row_format: RowFormat,
    model: ModelProfile,
    training: Training,
    objective: str,
    rate: float,
    epochs: int,
    batch: int,
) -> None:
    found = job(data(20_000, row_format), model, training=training).spec.training
    assert (found.objective, found.learning_rate, found.epochs) == (objective, rate, epochs)
    assert (found.global_batch_size, found.evaluation.every_steps > 0) == (batch, True)


def test_rare_answers_get_the_weight_of_frequent_ones() -> None:
    preference = job(data(1000, JUDGED)).spec.training.preference
    assert (preference.beta, preference.desirable_weight, preference.undesirable_weight) == (0.1, 1.0, 2.0)


def test_preferences_are_evaluated_four_times_an_epoch() -> None:
    training = job(data(10_000, PREFERENCES)).spec.training
    steps = -(-9_500 // training.global_batch_size)
    assert training.evaluation.every_steps == -(-steps // 4)


def test_the_length_of_a_preference_is_that_of_its_longer_answer() -> None:
    reason = reason_of(data(100, PREFERENCES), "spec.dataset.maxLength")
    assert reason.startswith("Tokens of a prompt with its longer answer: ")
    assert "A pair has up to twice as many" in reason


@pytest.mark.parametrize(
    ("row_format", "advice", "dataset"),
    [
        (PREFERENCES, 'completion: "{better}"', {"completion": "{better}"}),
        (PREFERRED_CHATS, 'messages: "better" and trainOn: last', {"messages": "better", "trainOn": "last"}),
    ],
)
def test_the_comment_says_how_to_learn_the_preferred_answers_only(
    row_format: RowFormat, advice: str, dataset: dict[str, str]
) -> None:
    profile = data(1000, row_format)
    choices = list(decide_training(profile, MODEL, GPUS, "full", None))
    reason = next(choice.reason for choice in choices if choice.path == "spec.training.objective")
    assert reason.endswith(
        "To learn only the preferred answers: objective: sft without preference, learningRate: 2.0e-05, and in dataset "
        f"{advice} instead of chosen and rejected."
    )
    changed = job(profile).model_dump(mode="json", by_alias=True, exclude_none=True)
    for name in ("chosen", "rejected"):
        del changed["spec"]["dataset"][name]
    changed["spec"]["dataset"] |= dataset
    del changed["spec"]["training"]["preference"]
    changed["spec"]["training"] |= {"objective": "sft", "learningRate": 2.0e-5}
    sft = FinetuneJob.model_validate(changed)
    assert sft.spec.training.learning_rate == job(data(1000)).spec.training.learning_rate


def test_one_row_of_related_texts_is_refused() -> None:
    with pytest.raises(JobError, match="comparing rows, and the data has one"):
        list(decide_training(data(1, RELATED), MODEL, GPUS, "full", None))


@given(
    st.integers(1, 10**7),
    LENGTHS,
    st.sampled_from(
        [
            QUESTIONS,
            PREFERENCES,
            PREFERRED_CHATS,
            RowFormat(text="text"),
            RowFormat(messages="chat", tools="tools"),
            *(TEXT_LABELS, WORD_LABELS, RELATED, JUDGED),
        ]
    ),
    st.sampled_from([GPUS, CPU]),
    st.sampled_from(["full", "lora", "qlora"]),
    st.sampled_from([None, 64, 131_072]),
    st.booleans(),
)
def test_every_profile_gives_a_valid_job(
    rows: int,
    lengths: dict[int, int],
    row_format: RowFormat,
    machine: MachineProfile,
    training: Training,
    positions: int | None,
    has_weights: bool,
) -> None:
    profile = replace(data(rows, row_format, lengths), measured_rows=sum(lengths.values()))
    has_weights = has_weights or row_format == JUDGED
    if row_format == RELATED:
        profile = replace(profile, rows=max(rows, 2))
    training = "full" if row_format == RELATED else training
    found = job(profile, replace(MODEL, max_positions=positions, has_weights=has_weights), machine, training)
    assert found.spec.dataset.row_format in ("completion", "text", "messages", "chosen", "query")
    assert positions is None or found.spec.dataset.max_length <= positions


@pytest.mark.parametrize(
    ("source", "model", "name"),
    [
        ("data/questions.jsonl", "hf://google-t5/t5-small", "t5-small-questions"),
        ("data/*.parquet", "models/Llama_2", "llama-2"),
        ("data/", "m" * 60, "m" * 40),
        ("***", "...", "finetune"),
    ],
)
def test_names_are_valid(source: str, model: str, name: str) -> None:
    assert name_of(source, model) == name


def column(name: str, script: str) -> ColumnProfile:
    return ColumnProfile(name, 10, 0, {"text": 10}, "", {script: 5})


def reason_of(profile: DataProfile, path: str) -> str:
    return next(choice.reason for choice in decide_dataset(profile, MODEL, 0) if choice.path == path)


def test_scripts_are_named_by_column_if_they_differ() -> None:
    source = "spec.dataset.prepare.source"
    same, other = (column("question", "Latin"), column("answer", "Latin")), (column("en", "Latin"), column("zh", "CJK"))
    assert "letters are mostly of the script Latin" in reason_of(replace(data(10), columns=same), source)
    assert "scripts of most letters: en Latin, zh CJK" in reason_of(replace(data(10), columns=other), source)


def test_columns_that_are_not_used_are_named_with_those_that_keep_cannot_carry() -> None:
    columns = tuple(column(name, "Latin") for name in ("question", "answer", "database", "labels"))
    reason = reason_of(replace(data(10), columns=columns), "spec.dataset.keep")
    assert "not used are database, labels. " in reason
    assert "It cannot carry labels: shards use this name themselves." in reason


def test_gpus_of_this_machine_are_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory, major, minor = "Tesla V100", 16 * 10**9, 7, 0

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _number: Properties)
    found = find_machine(None, "", "")
    assert (found.gpus, found.memory_bytes, found.bfloat16) == (2, 16 * 10**9, False)
    assert found.plan_options == " --device-memory 16000000000"
    assert find_machine(0, "", "").gpus == 0


def test_devices_that_are_not_here_are_planned_for() -> None:
    assert find_machine(4, "t4", "").bfloat16 is False
    assert find_machine(4, "", "24GB").memory_bytes == 24 * 10**9
    assert "assumed" in find_machine(4, "", "").description
    with pytest.raises(UsageError, match="--device h201: unknown device, did you mean h200"):
        find_machine(4, "h201", "")
