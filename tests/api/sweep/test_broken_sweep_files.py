"""Files of FinetuneSweeps with invalid fields or trials: one clear line per error, and exit code 20."""

from pathlib import Path
from typing import Any

import pytest

from spotune.crd import FINETUNE_SWEEPS, custom_resource_definition
from tests.api.service.test_broken_service_files import checked_fields
from tests.api.support.job_files import check_broken_job, run_validate
from tests.api.support.sweep_files import FULL_SWEEP_FILE, SWEEP_FILE

RATE = "training.learningRate: {logUniform: [1.0e-5, 1.0e-3]}"
SIZE = "training.globalBatchSize: {values: [32, 64]}"
RANK = "adapter.lora.r: {integer: [8, 16]}"
SEARCH = "search: {algorithm: random, trials: 12}"
FORMS = "set exactly one of values, uniform, logUniform and integer"
ASCENDING = "must be ascending: the lowest value, then the highest"
PLACE = "spec.parameters"

# (what is broken, text of the valid file, what is there instead, what is printed after the file's name)
WRONG_FIELDS = [
    ("no template", SWEEP_FILE[SWEEP_FILE.index("  template:") :], "", ":4: spec.template: is required"),
    (
        "no parameters",
        SWEEP_FILE[SWEEP_FILE.index("  parameters:") : SWEEP_FILE.index("  search:")],
        "",
        ":4: spec.parameters: is required",
    ),
    (
        "misspelt section",
        "earlyStopping",
        "earlyStoping",
        ":11: spec.earlyStoping: is not a field; did you mean earlyStopping?",
    ),
    (
        "misspelt form",
        "logUniform",
        "loguniform",
        f":6: {PLACE}.training.learningRate.loguniform: is not a field; did you mean logUniform?",
    ),
    (
        "misspelt field of the template",
        "epochs: 3",
        "epoch: 3",
        ":17: spec.template.spec.training.epoch: is not a field; did you mean epochs?",
    ),
]
WRONG_TRIALS = [
    (
        "misspelt parameter",
        "learningRate",
        "learnRate",
        f":6: {PLACE}.training.learnRate: is not a field; did you mean learningRate?",
    ),
    (
        "value that the field cannot have",
        "[32, 64]",
        "[32, 0]",
        f":7: {PLACE}.training.globalBatchSize: 0: expected at least 1, not 0",
    ),
    (
        "first value that the field cannot have",
        "[32, 64]",
        "[0, 32]",
        f":7: {PLACE}.training.globalBatchSize: expected at least 1, not 0",
    ),
    (
        "end of a range that the field cannot have",
        RANK,
        "adapter.lora.dropout: {uniform: [0.0, 1.0]}",
        f":8: {PLACE}.adapter.lora.dropout: 1.0: expected less than 1, not 1.0",
    ),
    (
        "text for a number",
        "[32, 64]",
        "[32, many]",
        f":7: {PLACE}.training.globalBatchSize: 'many': expected a whole number, not \"many\"",
    ),
    (
        "value for a section",
        RANK,
        "adapter.lora: {values: [8]}",
        f":8: {PLACE}.adapter.lora: expected a section with fields of its own, not 8",
    ),
    (
        "field of no section",
        RANK,
        "training.epochs.x: {values: [8]}",
        f":8: {PLACE}.training.epochs.x: training.epochs is no section of the template",
    ),
    (
        "value that goes with no other",
        RANK,
        f"training.optimizer: {{values: [adamw, muon]}}\n    {RANK}",
        (
            f":8: {PLACE}.training.optimizer: 'muon': muon is for whole weight matrices, not for "
            "those of an adapter: use "
            "another optimizer"
        ),
    ),
    (
        "part of a pair",
        RANK,
        "training.objective: {values: [sft, dpo]}",
        f":8: {PLACE}.training.objective: 'dpo': dpo is for causal models; model.task is seq2seq",
    ),
]
ONLY_MODELS = [
    (
        "two forms",
        "values: [32, 64]",
        "values: [32], uniform: [1.0, 2.0]",
        f":7: {PLACE}.training.globalBatchSize: {FORMS}",
    ),
    ("no form", "{values: [32, 64]}", "{}", f":7: {PLACE}.training.globalBatchSize: {FORMS}"),
    ("value twice", "[32, 64]", "[32, 32]", f":7: {PLACE}.training.globalBatchSize.values: lists a value twice"),
    (
        "mapping as a value",
        "[32, 64]",
        "[{a: 1}]",
        f":7: {PLACE}.training.globalBatchSize.values[0]: expected a text, a number, true or false, not a mapping",
    ),
    (
        "large grid",
        f"{RATE}\n    {SIZE}\n    {RANK}\n  {SEARCH}",
        "adapter.lora.r: {integer: [1, 500]}\n  search: {algorithm: grid}",
        ":7: spec.search.trials: the grid has more than 200 combinations: set a number, or use tpe",
    ),
]
WRONG_VALUES = [
    (
        "no parameter",
        f"\n    {RATE}\n    {SIZE}\n    {RANK}",
        " {}",
        ":5: spec.parameters: expected a mapping of at least 1, not a mapping",
    ),
    (
        "range of three",
        "[1.0e-5, 1.0e-3]",
        "[1.0e-5, 1.0e-4, 1.0e-3]",
        f":6: {PLACE}.training.learningRate.logUniform: expected a list of at most 2, not 3",
    ),
    (
        "unknown algorithm",
        "algorithm: random",
        "algorithm: bayes",
        ':9: spec.search.algorithm: expected grid, random or tpe, not "bayes"',
    ),
    ("too many trials", "trials: 12", "trials: 201", ":9: spec.search.trials: expected at most 200, not 201"),
    (
        "name of a metric with a space",
        "metric: loss",
        "metric: my loss",
        ':10: spec.objective.metric: expected the name of a metric such as loss or exactMatch, not "my loss"',
    ),
    (
        "reduction by one",
        "minSteps: 100",
        "minSteps: 100, reductionFactor: 1",
        ":11: spec.earlyStopping.reductionFactor: expected at least 2, not 1",
    ),
    (
        "no trial at a time",
        "maxConcurrent: 4",
        "maxConcurrent: 0",
        ":12: spec.maxConcurrent: expected at least 1, not 0",
    ),
    (
        "negative budget",
        "maxConcurrent: 4",
        "budget: {maxGpuHours: -1}",
        ":12: spec.budget.maxGpuHours: expected at least 0, not -1",
    ),
]
WRONG_COMBINATIONS = [
    (
        "long name",
        "t5-search",
        "a" * 37,
        ":3: metadata.name: has 37 characters; at most 36 are allowed, because names of trials are made from it",
    ),
    (
        "range from high to low",
        "[1.0e-5, 1.0e-3]",
        "[1.0e-3, 1.0e-5]",
        f":6: {PLACE}.training.learningRate.logUniform: {ASCENDING}",
    ),
    (
        "logarithm of zero",
        "[1.0e-5, 1.0e-3]",
        "[0.0, 1.0e-3]",
        f":6: {PLACE}.training.learningRate.logUniform: must be more than 0: use uniform for other numbers",
    ),
    (
        "two ranges",
        RANK,
        "adapter.lora.r: {integer: [8, 16], uniform: [8.0, 16.0]}",
        f":8: {PLACE}.adapter.lora.r: {FORMS}",
    ),
    (
        "parameter that changes no model",
        RANK,
        "workers.count: {values: [1, 2]}",
        (
            f":5: {PLACE}: workers.count does not define what is trained: use fields of model, "
            "adapter, dataset and training"
        ),
    ),
    (
        "parameter of the evaluation",
        RANK,
        "dataset.eval.fraction: {values: [0.1, 0.2]}",
        f":5: {PLACE}: dataset.eval.fraction changes how trials are evaluated: they could not be compared",
    ),
    (
        "grid over a range",
        SEARCH,
        "search: {algorithm: grid}",
        (
            f":5: {PLACE}: training.learningRate has infinitely many values, and grid tries all of "
            "them: use values, integer, "
            "or tpe"
        ),
    ),
    (
        "random search without an end",
        ", trials: 12",
        "",
        ":9: spec.search.trials: is required by random: set the number of trials",
    ),
    (
        "maximum of the loss",
        "metric: loss",
        "mode: maximize",
        ":10: spec.objective.mode: lower values of loss are better: remove this field",
    ),
    (
        "minimum of the accuracy",
        "metric: loss",
        "metric: accuracy, mode: minimize",
        ":10: spec.objective.mode: higher values of accuracy are better: remove this field",
    ),
    (
        "asha without a rung",
        ", minSteps: 100",
        "",
        (
            ":11: spec.earlyStopping.minSteps: is required by asha: set the number of steps after "
            "which trials are compared"
        ),
    ),
    (
        "metric that is not evaluated",
        "metric: loss",
        "metric: bleu",
        ":10: spec.objective.metric: bleu is not evaluated: add it to template.spec.training.evaluation.metrics",
    ),
    (
        "score of the harness without tasks",
        "metric: loss",
        "metric: arc_easy/acc",
        (
            ":10: spec.objective.metric: arc_easy/acc is a score of lm-evaluation-harness: set "
            "template.spec.training.evaluation.harness.tasks"
        ),
    ),
    (
        "evaluation only at the end",
        "everySteps: 50",
        "samples: 5",
        (
            ":17: spec.template.spec.training.evaluation.everySteps: must be at least 1, because "
            "earlyStopping compares "
            "evaluations during training"
        ),
    ),
    (
        "suspended template",
        "      training:",
        "      suspend: true\n      training:",
        ":17: spec.template.spec.suspend: is set by the sweep: use spec.suspend",
    ),
    (
        "template with a ttl",
        "      training:",
        "      ttlSecondsAfterFinished: 60\n      training:",
        (
            ":17: spec.template.spec.ttlSecondsAfterFinished: could delete a trial before the sweep has its "
            "result: use spec.ttlSecondsAfterFinished"
        ),
    ),
    (
        "served template",
        "      training:",
        "      serving: {}\n      training:",
        ":17: spec.template.spec.serving: would serve every trial: write a ModelService for the best one",
    ),
    (
        "upload of every trial",
        "      training:",
        "      output: {hub: {repo: me/t5}}\n      training:",
        ":17: spec.template.spec.output.hub: would be overwritten by every trial: upload the best one at the end",
    ),
]
WITHOUT_EVALUATION = SWEEP_FILE.replace("eval: {fraction: 0.1}, ", "").replace(
    "evaluation: {everySteps: 50}", "seed: 1"
)
BROKEN: list[Any] = [*WRONG_FIELDS, *WRONG_TRIALS, *ONLY_MODELS, *WRONG_VALUES, *WRONG_COMBINATIONS]


def names(cases: list[Any]) -> list[str]:
    return [case[0].replace(" ", "-") for case in cases]


@pytest.mark.parametrize(("valid", "broken", "line"), [case[1:] for case in BROKEN], ids=names(BROKEN))
def test_a_broken_sweep_file_gives_one_clear_line_and_exit_code_20(
    valid: str,
    broken: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert valid in SWEEP_FILE
    check_broken_job(valid, broken, line, tmp_path, monkeypatch, capsys, SWEEP_FILE)


def test_scores_of_the_harness_prune_no_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scored = SWEEP_FILE.replace("metric: loss", "metric: arc_easy/acc").replace(
        "everySteps: 50", "harness: {tasks: [arc_easy]}"
    )
    (tmp_path / "sweep.yaml").write_text(scored)
    code, error = run_validate(capsys, str(tmp_path / "sweep.yaml"))
    assert code == 20
    assert "objective.metric: arc_easy/acc is a score of lm-evaluation-harness, by which no trials are pruned" in error
    (tmp_path / "sweep.yaml").write_text(scored.replace("algorithm: asha, minSteps: 100", ""))
    assert run_validate(capsys, str(tmp_path / "sweep.yaml")) == (0, "")


def test_trials_without_evaluation_data_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.yaml").write_text(WITHOUT_EVALUATION.replace("{algorithm: asha, minSteps: 100}", "{}"))
    code, error = run_validate(capsys, str(tmp_path / "sweep.yaml"))
    assert code == 20
    assert "spec.template.spec.dataset.eval: is required, because trials are compared by evaluations" in error


@pytest.mark.parametrize("text", [SWEEP_FILE, FULL_SWEEP_FILE], ids=["small", "full"])
def test_the_unmodified_sweep_file_is_valid(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.yaml").write_text(text)
    assert run_validate(capsys, str(tmp_path / "sweep.yaml")) == (0, "")


@pytest.mark.parametrize("line", [case[3] for case in WRONG_COMBINATIONS], ids=names(WRONG_COMBINATIONS))
def test_the_api_server_checks_the_same_combinations(line: str) -> None:
    """tests/cluster/test_sweep_crd.py sends the files to an API server."""
    schema = custom_resource_definition(FINETUNE_SWEEPS)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    parameter = schema["properties"]["spec"]["properties"]["parameters"]["additionalProperties"]
    of_parameters = {f"spec.parameters.*.{field}".rstrip(".") for field in checked_fields(parameter)}
    field = line.split(":")[2].strip()
    for path in ("training.learningRate", "adapter.lora.r"):
        field = field.replace(path, "*")
    found = set(checked_fields(schema)) | of_parameters
    assert field in found or (field == "metadata.name" and any("36 characters" in text for text in messages(schema)))


def messages(schema: dict[str, Any]) -> list[str]:
    return [rule["message"] for rule in schema["x-kubernetes-validations"]]
