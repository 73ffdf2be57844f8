"""The fingerprint depends on what is trained, and on nothing else."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotune.fingerprint import changed_fields, fingerprint
from tests.api.support.job_files import a_job

MODEL = {"source": "model", "task": "seq2seq"}
DATASET = {"train": {"source": "shards"}}
TRAINING = {"epochs": 1}
EVALUATED = {"train": {"source": "shards"}, "eval": {"fraction": 0.1}}


@pytest.mark.parametrize(
    ("sections", "fields"),
    [
        ({"model": MODEL | {"source": "other"}}, ["spec.model.source"]),
        ({"model": MODEL | {"dtype": "float32"}}, ["spec.model.dtype"]),
        ({"model": MODEL | {"task": "causal"}}, ["spec.model.task"]),
        ({"adapter": {"lora": {}}}, ["spec.adapter"]),
        ({"adapter": {"lora": {"r": 8}}}, ["spec.adapter"]),
        ({"dataset": DATASET | {"maxLength": 64}}, ["spec.dataset.maxLength"]),
        ({"dataset": EVALUATED}, ["spec.dataset.eval"]),
        (
            {"dataset": {"mixture": [{"name": "sql", "train": {"source": "shards"}}]}},
            ["spec.dataset.mixture", "spec.dataset.train"],
        ),
        ({"training": TRAINING | {"seed": 1}}, ["spec.training.seed"]),
        ({"training": TRAINING | {"neftuneNoiseAlpha": 5}}, ["spec.training.neftuneNoiseAlpha"]),
        ({"training": TRAINING | {"optimizer": "muon"}}, ["spec.training.optimizer"]),
        ({"training": TRAINING | {"emaDecay": 0.999}}, ["spec.training.emaDecay"]),
        (
            {"training": TRAINING | {"learningRate": 0.1, "globalBatchSize": 8}},
            ["spec.training.globalBatchSize", "spec.training.learningRate"],
        ),
    ],
)
def test_changes_of_what_is_trained_change_the_fingerprint_and_are_named(
    sections: dict[str, Any], fields: list[str]
) -> None:
    old, new = a_job(), a_job(**sections)
    assert fingerprint(old) != fingerprint(new)
    assert changed_fields(old, new) == changed_fields(new, old) == fields


def test_a_field_within_an_adapter_is_named_if_both_have_one() -> None:
    old, new = a_job(adapter={"lora": {}}), a_job(adapter={"lora": {"r": 8}})
    assert changed_fields(old, new) == ["spec.adapter.lora.r"]


def test_a_share_of_a_mixture_belongs_to_what_is_trained() -> None:
    mixtures = [[{"name": "sql", "train": {"source": "shards"}, "weight": weight}] for weight in (1, 2)]
    old, new = (a_job(dataset={"mixture": mixture}) for mixture in mixtures)
    assert changed_fields(old, new) == ["spec.dataset.mixture"]


@pytest.mark.parametrize("field", ["config", "split"])
def test_the_split_of_raw_data_belongs_to_what_is_trained(field: str) -> None:
    old, new, default = (
        a_job(dataset={"prepare": {"source": "hf://datasets/me/rows"} | named, "prompt": "{a}", "completion": "{b}"})
        for named in ({}, {field: "a"}, {field: ""})
    )
    assert changed_fields(old, new) == [f"spec.dataset.prepare.{field}"]
    assert fingerprint(old) == fingerprint(default)


@pytest.mark.parametrize(
    "sections",
    [
        {"training": {"epochs": 9}},
        {"training": {"maxSteps": 100}},
        {"training": TRAINING | {"maxBadSteps": 0}},
        {"training": TRAINING | {"learningRate": 5e-5, "optimizer": "adamw", "neftuneNoiseAlpha": 0}},  # the defaults
        {"training": TRAINING | {"muonMomentum": 0.95, "emaDecay": 0}},  # the defaults
        {"model": MODEL | {"tokenSecretRef": {"name": "a", "key": "b"}}},
        {"dataset": DATASET | {"credentials": {"secretName": "a"}}},
        {"dataset": DATASET | {"trainOn": "assistant", "trainTrailingWhitespace": False}},  # the defaults
        {"execution": {"zeroStage": 3, "microBatchSize": 1}},
        {"workers": {"count": 8, "gpus": 8}},
        {"checkpoint": {"every": 5}},
        {"serving": {"name": "sql"}},
        {"retry": {"maxGpuHours": 5}},
    ],
)
def test_execution_and_duration_do_not_change_the_fingerprint(sections: dict[str, Any]) -> None:
    old, new = a_job(), a_job(**sections)
    assert fingerprint(old) == fingerprint(new)
    assert changed_fields(old, new) == []


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise"])
def test_fp8_belongs_to_what_is_trained_and_bf16_is_as_before(precision: str) -> None:
    causal = {"model": MODEL | {"task": "causal"}}
    old, same, new = (a_job(**causal, execution=each) for each in ({}, {"precision": "bf16"}, {"precision": precision}))
    assert fingerprint(old) == fingerprint(same) != fingerprint(new)
    assert changed_fields(old, new) == changed_fields(new, old) == ["spec.execution.precision"]


def test_evaluation_does_not_change_the_fingerprint() -> None:
    old = a_job(dataset=EVALUATED)
    new = a_job(dataset=EVALUATED, training={"epochs": 1, "evaluation": {"everySteps": 5}})
    assert fingerprint(old) == fingerprint(new)


def test_the_fingerprint_is_the_same_in_every_process_and_version() -> None:
    assert fingerprint(a_job()) == "c338eb9e992c31b750e388138c2a57fc79186407d85a742f6552dfed56226190"


@settings(max_examples=50, deadline=None)
@given(
    seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)), lengths=st.tuples(st.integers(1, 99), st.integers(1, 99))
)
def test_two_jobs_have_the_same_fingerprint_exactly_if_no_field_changed(
    seeds: tuple[int, int], lengths: tuple[int, int]
) -> None:
    old, new = (
        a_job(training={"epochs": 1, "seed": seed}, dataset=DATASET | {"maxLength": length})
        for seed, length in zip(seeds, lengths, strict=True)
    )
    assert (fingerprint(old) == fingerprint(new)) == (not changed_fields(old, new))
