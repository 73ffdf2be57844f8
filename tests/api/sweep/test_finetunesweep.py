"""The models of a FinetuneSweep: defaults, round trips, names of trials, and the jobs of trials."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotune.job import FinetuneJob
from spotune.job_file.load import load_sweep, parse_sweep, replace_fields
from spotune.job_file.trials import trial_job
from spotune.job_file.yaml_file import Document
from spotune.sweep import FinetuneSweep
from tests.api.crd.test_definition import SWEEP, at, with_defaults
from tests.api.support.sweep_files import FULL_SWEEP_FILE, SWEEP_FILE, a_sweep
from tests.command_line import run_spotune


def full_sweep(tmp_path: Path) -> FinetuneSweep:
    (tmp_path / "sweep.yaml").write_text(FULL_SWEEP_FILE)
    return load_sweep(tmp_path / "sweep.yaml")


def test_a_sweep_needs_parameters_a_template_and_a_number_of_trials() -> None:
    content = yaml.safe_load(SWEEP_FILE)
    content["spec"] = {
        **{name: content["spec"][name] for name in ("parameters", "template")},
        "search": {"trials": 3},
    }
    spec = parse_sweep(Document(content)).spec
    assert (spec.search.algorithm, spec.search.seed, spec.num_trials) == ("tpe", 0, 3)
    assert (spec.objective.metric, spec.objective.direction) == ("loss", "minimize")
    assert (spec.early_stopping.algorithm, spec.max_concurrent, spec.budget.max_gpu_hours) == ("none", 1, 0)


def test_a_sweep_with_every_field_survives_a_round_trip_through_yaml_and_json(tmp_path: Path) -> None:
    sweep = full_sweep(tmp_path)
    content = sweep.model_dump(mode="json", exclude_unset=True)
    assert content == yaml.safe_load(FULL_SWEEP_FILE)
    assert FinetuneSweep.model_validate_json(json.dumps(content)) == sweep


@pytest.mark.parametrize(
    ("objective", "direction"),
    [
        ({}, "minimize"),
        ({"metric": "accuracy"}, "maximize"),
        ({"metric": "error", "mode": "minimize"}, "minimize"),
        ({"metric": "arc_easy/acc"}, "maximize"),
        ({"metric": "wikitext/word_perplexity"}, "minimize"),
    ],
)
def test_the_direction_of_an_objective_follows_its_metric(
    objective: dict[str, str], direction: str, tmp_path: Path
) -> None:
    found = full_sweep(tmp_path).spec.objective
    assert type(found).model_validate(objective).direction == direction


def test_a_grid_has_every_combination_unless_fewer_are_asked_for() -> None:
    parameters = {"training.seed": {"integer": [1, 4]}, "training.globalBatchSize": {"values": [32, 64]}}
    assert a_sweep(parameters=parameters, search={"algorithm": "grid"}).spec.num_trials == 8
    assert a_sweep(parameters=parameters, search={"algorithm": "grid", "trials": 5}).spec.num_trials == 5
    assert a_sweep(parameters=parameters, search={"algorithm": "grid", "trials": 50}).spec.num_trials == 8


def test_the_job_of_a_trial_is_the_template_with_its_parameters() -> None:
    sweep = a_sweep()
    parameters = {"training.learningRate": 0.001, "adapter.lora.r": 8}
    content, problems = trial_job(sweep, 3, parameters)
    assert problems == []
    job = FinetuneJob.model_validate(content)
    assert (job.metadata.name, job.metadata.namespace) == ("t5-search-3", "team")
    expected = {f"spec.{path}": value for path, value in parameters.items()}
    template = FinetuneJob.model_validate({**content, "spec": sweep.spec.template.spec.model_dump(exclude_unset=True)})
    with_adapter = replace_fields(template, {"spec.adapter": {"lora": {}}})
    assert job == replace_fields(with_adapter, expected)
    assert sweep.spec.template.spec.adapter is None, "the template is not changed"


def test_the_argument_of_a_function_keeps_what_no_parameter_sets(tmp_path: Path) -> None:
    content, problems = trial_job(full_sweep(tmp_path), 0, {"training.config.layers": 2})
    assert problems == []
    assert content["spec"]["training"]["config"] == {"epochs": 8, "layers": 2}


@pytest.mark.parametrize(
    ("parameter", "paths"),
    [("dataset.mixture[0].weight", ["a", "b"]), ("dataset.mixture[2].weight", [])],
    ids=["there", "missing"],
)
def test_an_item_of_a_list_of_the_template_is_set_if_it_exists(parameter: str, paths: list[str]) -> None:
    sources = [{"name": name, "train": {"source": name}, "weight": 1.0} for name in ("a", "b")]
    template: dict[str, Any] = {
        "model": {"source": "hf://google-t5/t5-small", "task": "seq2seq"},
        "dataset": {"mixture": sources, "eval": {"fraction": 0.1}, "prompt": "{q}", "completion": "{a}"},
        "training": {"epochs": 3},
    }
    sweep = FinetuneSweep.model_validate(
        {
            "metadata": {"name": "mix"},
            "spec": {
                "parameters": {parameter: {"values": [1.0, 2.0]}},
                "search": {"algorithm": "grid"},
                "template": {"spec": template},
            },
        }
    )
    content, problems = trial_job(sweep, 0, {parameter: 2.0})
    if paths:
        assert [source["weight"] for source in content["spec"]["dataset"]["mixture"]] == [2.0, 1.0]
    else:
        assert [problem.message for problem in problems] == ["dataset.mixture[2] is not in the template"]


def test_validate_says_how_many_trials_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP_FILE)
    assert run_spotune(capsys, "validate", file) == (0, f"{file}: valid (t5-search, 12 trials)\n", "")
    code, out, _ = run_spotune(capsys, "validate", file, "--output", "json")
    assert json.loads(out) == {
        "file": str(file), "valid": True, "kind": "FinetuneSweep", "name": "t5-search", "trials": 12
    }  # fmt: skip
    assert code == 0


@pytest.mark.parametrize("text", [SWEEP_FILE, FULL_SWEEP_FILE], ids=["small", "full"])
def test_trials_of_a_template_with_every_default_of_the_api_server_are_valid(text: str) -> None:
    content = yaml.safe_load(text)
    content["spec"] = with_defaults(content["spec"], at(".spec", SWEEP))
    sweep = parse_sweep(Document(content))
    first = {path: parameter.extremes[0] for path, parameter in sweep.spec.parameters.items()}
    defaulted, problems = trial_job(sweep, 0, first)
    assert problems == []
    written, _ = trial_job(parse_sweep(Document(yaml.safe_load(text))), 0, first)
    assert FinetuneJob.model_validate(defaulted).spec == FinetuneJob.model_validate(written).spec
