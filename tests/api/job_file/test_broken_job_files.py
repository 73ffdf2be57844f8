"""Files that are not FinetuneJobs or have unknown fields: one clear line per error, and exit code 20."""

from pathlib import Path

import pytest

from tests.api.support.job_files import JOB_FILE, check_broken_job, run_validate

WORKERS = "  workers: {count: 2, min: 1}\n"
TRAIN = "    train: {source: shards/train}\n"
FIELDS_OF_WORKERS = (
    "count, min, gpus, capacity, onDemandAfter, pools, poolPatience, mixGpuTypes, resources, "
    "serviceAccountName, podTemplate, resizeCooldown, nodeCheck, onStraggler"
)
SECTIONS = (
    "model, adapter, dataset, training, execution, checkpoint, tracking, output, workers, head, storage, cluster, "
    "retry, deadline, maxCost, suspend, cleanup, ttlSecondsAfterFinished, serving"
)
NOT_A_MAPPING = "not a mapping with apiVersion, kind, metadata and spec"

# (what is broken, text of the valid file, what is there instead, what is printed after the file's name)
NOT_YAML = [
    ("tab", "  dataset:", "\tdataset:", ":6: is not YAML: a tab is used for indentation; use spaces"),
    (
        "brace not closed",
        "{count: 2, min: 1}",
        "{count: 2, min: 1",
        (
            ":11: is not YAML: expected ',' or '}', but got '<stream end>' while parsing a flow mapping "
            "that starts in line 10"
        ),
    ),
    (
        "quote not closed",
        'small"',
        "small",
        ":11: is not YAML: found unexpected end of stream while scanning a quoted scalar that starts in line 5",
    ),
    (
        "template without quotes",
        TRAIN,
        TRAIN + "    prompt: {question}: {input}\n",
        ":8: is not YAML: mapping values are not allowed here (indentation, or text with ': ' in it that needs quotes)",
    ),
    (
        "indentation",
        "    eval:",
        "   eval:",
        (
            ":8: is not YAML: expected <block end>, but found '<block mapping start>' while parsing a block mapping "
            "that starts in line 5"
        ),
    ),
    ("alias of nothing", "{count: 2, min: 1}", "*small", ":10: is not YAML: found undefined alias 'small'"),
    (
        "alias of itself",
        "{count: 2, min: 1}",
        "&w {count: 2, min: *w}",
        ":10: spec.workers.min: is an alias to a section that it is in itself",
    ),
    (
        "python object",
        "{count: 2, min: 1}",
        "!!python/object:os.system {}",
        ":10: is not YAML: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object:os.system'",
    ),
    (
        "key that is a list",
        "{count: 2, min: 1}",
        "{[1]: 2}",
        ":10: is not YAML: found unhashable key while constructing a mapping",
    ),
    ("key given twice", WORKERS, "  model: {source: x}\n", ":10: spec.model: is given twice; the first is in line 5"),
    (
        "null byte",
        "min: 1}",
        "min: 1}\x00",
        (
            ': is not YAML: unacceptable character #x0000: special characters are not allowed in "<unicode string>", '
            "position 300"
        ),
    ),
    ("nested for ever", "{count: 2, min: 1}", "[" * 5000, ": is nested too deeply"),
]
NOT_A_JOB = [
    ("empty file", JOB_FILE, "", ": is empty"),
    ("comments only", JOB_FILE, "# nothing here\n---\n", ": is empty"),
    (
        "list",
        JOB_FILE,
        "- a\n",
        f": is not a FinetuneJob, ModelService or FinetuneSweep: it holds a list, {NOT_A_MAPPING}",
    ),
    (
        "text",
        JOB_FILE,
        "spotune\n",
        f": is not a FinetuneJob, ModelService or FinetuneSweep: it holds a single value, {NOT_A_MAPPING}",
    ),
    (
        "two jobs",
        JOB_FILE,
        f"{JOB_FILE}---\n{JOB_FILE}",
        (
            ": holds 2 YAML documents (FinetuneJob, FinetuneJob); "
            "give one FinetuneJob, ModelService or FinetuneSweep per file"
        ),
    ),
    (
        "another document",
        JOB_FILE,
        f"a: 1\n---\n{JOB_FILE}",
        ": holds 2 YAML documents (no kind, FinetuneJob); give one FinetuneJob, ModelService or FinetuneSweep per file",
    ),
    (
        "another kind",
        "kind: FinetuneJob",
        "kind: RayCluster",
        ":2: kind: is 'RayCluster'; expected kind: FinetuneJob, ModelService or FinetuneSweep",
    ),
    (
        "no kind",
        "kind: FinetuneJob\n",
        "",
        ":1: kind: is missing; expected kind: FinetuneJob, ModelService or FinetuneSweep",
    ),
    (
        "another version",
        "v1alpha1",
        "v1",
        ":1: apiVersion: is 'spotune.dev/v1'; expected apiVersion: spotune.dev/v1alpha1",
    ),
]
WRONG_FIELDS = [
    ("no metadata", "metadata: {name: t5-wikisql}\n", "", ":1: metadata: is required"),
    ("no name", "{name: t5-wikisql}", "{}", ":3: metadata.name: is required"),
    ("no spec", JOB_FILE[JOB_FILE.index("spec:") :], "", ":1: spec: is required"),
    (
        "empty spec",
        JOB_FILE[JOB_FILE.index("spec:") :],
        "spec:\n",
        ":4: spec: is empty; it needs fields such as model, adapter, dataset, training",
    ),
    ("no model source", 'source: "hf://google-t5/t5-small", ', "", ":5: spec.model.source: is required"),
    ("misspelt field", "task:", "tsk:", ":5: spec.model.tsk: is not a field; did you mean task?"),
    (
        "snake case",
        "globalBatchSize",
        "global_batch_size",
        ":9: spec.training.global_batch_size: is not a field; did you mean globalBatchSize?",
    ),
    (
        "field of another section",
        "min: 1",
        "learningRate: 0.1",
        ":10: spec.workers.learningRate: is not a field here; learningRate is at spec.training.learningRate",
    ),
    (
        "metric of early stopping in the wrong place",
        "epochs: 3",
        "epochs: 3, evaluation: {everySteps: 10, earlyStopping: {metric: loss}}",
        (
            ":9: spec.training.evaluation.earlyStopping.metric: is not a field here; metric is at "
            "spec.training.evaluation.best.metric and spec.serving.rollout.promoteIf.metric and status.best.metric"
        ),
    ),
    (
        "unknown field",
        "min: 1",
        "colour: red",
        f":10: spec.workers.colour: is not a field; spec.workers has {FIELDS_OF_WORKERS}",
    ),
    ("unknown section", WORKERS, "  gpu: {}\n", f":10: spec.gpu: is not a field; spec has {SECTIONS}"),
    (
        "unknown part",
        "spec:",
        "colour: red\nspec:",
        ":4: colour: is not a field; a FinetuneJob has apiVersion, kind, metadata, spec, status",
    ),
    (
        "list for a section",
        "{count: 2, min: 1}",
        "[2]",
        ":10: spec.workers: expected a section with fields of its own, not a list",
    ),
    (
        "number for a section",
        "{count: 2, min: 1}",
        "2",
        ":10: spec.workers: expected a section with fields of its own, not 2",
    ),
    (
        "number for metadata",
        "{name: t5-wikisql}",
        "5",
        ":3: metadata: expected a section with fields of its own, not 5",
    ),
]
BROKEN = [*NOT_YAML, *NOT_A_JOB, *WRONG_FIELDS]


@pytest.mark.parametrize(
    ("valid", "broken", "line"), [case[1:] for case in BROKEN], ids=[case[0].replace(" ", "-") for case in BROKEN]
)
def test_a_file_that_is_no_job_gives_one_clear_line_and_exit_code_20(
    valid: str,
    broken: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_broken_job(valid, broken, line, tmp_path, monkeypatch, capsys)


def test_the_unmodified_job_file_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(JOB_FILE)
    assert run_validate(capsys, str(tmp_path / "job.yaml")) == (0, "")


def test_more_than_two_commits_in_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = "  checkpoint: {memoryCopies: 3}\n  workers:"
    line = ":10: spec.checkpoint.memoryCopies: expected auto, 0, 1 or 2, not 3"
    check_broken_job("  workers:", broken, line, tmp_path, monkeypatch, capsys)


def test_all_problems_are_listed_in_the_order_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = JOB_FILE.replace("min: 1", "min: 0").replace("task:", "tsk:").replace("epochs: 3", "epochs: -3")
    Path("job.yaml").write_text(text)
    code, printed = run_validate(capsys, "job.yaml")
    assert printed.splitlines() == [
        "job.yaml:5: spec.model.tsk: is not a field; did you mean task?",
        "job.yaml:9: spec.training.epochs: expected at least 1, not -3",
        "job.yaml:10: spec.workers.min: expected auto or a whole number from 1, not 0",
    ]
    assert code == 20


def test_a_binary_file_is_no_job_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"ab\xff\xfe")
    what = "is not a text file in UTF-8 (byte 2 cannot be decoded)"
    assert run_validate(capsys, str(file)) == (20, f"{file}: {what}\n")


def test_a_file_that_does_not_exist_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "jop.yaml"
    assert run_validate(capsys, str(missing)) == (2, f"{missing}: does not exist\n")


def test_a_directory_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what = "is a directory; pass the YAML file in it"
    assert run_validate(capsys, str(tmp_path)) == (2, f"{tmp_path}: {what}\n")


def test_a_file_that_cannot_be_read_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_validate(capsys, "/proc/self/mem") == (20, "/proc/self/mem: cannot be read: Input/output error\n")
