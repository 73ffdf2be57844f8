"""Metric functions of the user: located without running code, imported, called, and rejected with a clear error."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from streaming.base.format.mds import MDSWriter

from spotune.errors import JobError
from spotune.job import EvaluationSpec
from spotune_trainer import files
from spotune_trainer.evaluation.custom_metrics import load_custom_metric, missing_functions
from spotune_trainer.evaluation.metrics import build_metrics, mean_score
from tests.trainer.support.live import LiveRun
from tests.trainer.support.runs import Runs
from tests.trainer.support.tiny import make_rows, save_tokenizer

MODULE = """
import atexit
from os.path import join, splitext as stem
import json.decoder

class Found:
    def inner(self): ...

def length(answer, reference, columns):
    return len(answer)

def two(answer, reference): ...

async def later(answer, reference, columns): ...

try:
    import nowhere_to_be_found
except ImportError:
    fallback = lambda *judged: 1
number = 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in `sys.path` with a package and a namespace package in it."""
    folder = tmp_path / "judges"
    (folder / "deep").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('preflight must not run this')")
    (folder / "deep" / "code.py").write_text(MODULE)
    (tmp_path / "spaced").mkdir()
    (tmp_path / "spaced" / "plain.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("judges", "spaced", "judge")]:
        del sys.modules[name]


def evaluation_with(*metrics: str) -> EvaluationSpec:
    return EvaluationSpec.model_validate({"generate": True, "metrics": list(metrics)})


def score_of(package: Path, body: str) -> Any:
    """The score of a function with this body."""
    (package / "judge.py").write_text(f"import math\ndef judge(answer, reference, columns):\n    {body}\n")
    sys.modules.pop("judge", None)
    return load_custom_metric("judge:judge")("an answer", "the reference", {"column": "text"})


@pytest.mark.parametrize("name", ["length", "Found", "join", "stem", "json", "fallback", "number", "later", "two"])
@pytest.mark.parametrize("module", ["judges.deep.code", "spaced.plain"])
def test_functions_are_found_without_running_code(package: Path, module: str, name: str) -> None:
    assert missing_functions(evaluation_with("loss", f"{module}:{name}")) == []
    assert not {"judges", "spaced"} & sys.modules.keys()


def test_names_that_may_exist_at_run_time_count_as_found(package: Path) -> None:
    (package / "judge.py").write_text("from os.path import *")
    assert missing_functions(evaluation_with("judge:anything", "math:sqrt")) == []


@pytest.mark.parametrize(
    ("entry_point", "reason"),
    [
        ("judgements:length", "there is no module judgements"),
        ("judges.shallow.code:length", "there is no module judges.shallow.code"),
        ("judges.deep.code.more:length", "there is no module judges.deep.code.more"),
        ("judges.deep.code:width", "the module has no width"),
        ("judges.deep.code:decoder", "the module has no decoder"),
        ("judges.torn:length", "the module cannot be read (SyntaxError: "),
    ],
)
def test_a_missing_function_is_reported_with_a_remedy(package: Path, entry_point: str, reason: str) -> None:
    (package / "judges" / "torn.py").write_text("def length(")
    [message] = missing_functions(evaluation_with(entry_point, "exactMatch"))
    assert message.startswith(f"{entry_point}: {reason}")
    assert "in the image (cluster.image)" in message
    assert "PYTHONPATH" in message


def test_a_module_is_found_once_it_is_added(package: Path) -> None:
    assert missing_functions(evaluation_with("judge:judge")) != []
    (package / "judge.py").write_text("def judge(answer, reference, columns): ...")
    assert missing_functions(evaluation_with("judge:judge")) == []


@pytest.mark.parametrize(
    ("entry_point", "message"),
    [
        ("judgements:length", r"cannot be imported \(ModuleNotFoundError: No module named 'judgements'\): correct"),
        ("judges.deep.code:length", r"cannot be imported \(RuntimeError: preflight must not run this\)"),
        ("spaced.plain:width", r"cannot be imported \(AttributeError: .*no attribute 'width'"),
        ("spaced.plain:number", r"is not a function but 3: name a function"),
        ("spaced.plain:two", r"cannot be called with \(answer, reference, columns\): too many positional arguments"),
    ],
)
def test_an_invalid_function_is_rejected_on_import(package: Path, entry_point: str, message: str) -> None:
    with pytest.raises(JobError, match=f"^training.evaluation.metrics: {re.escape(entry_point)} {message}"):
        build_metrics(evaluation_with("exactMatch", entry_point))


def test_a_module_that_exits_python_is_rejected(package: Path) -> None:
    (package / "judge.py").write_text("raise SystemExit(3)")
    with pytest.raises(JobError, match=r"judge:judge cannot be imported \(SystemExit: 3\)"):
        load_custom_metric("judge:judge")


def test_metrics_are_named_after_their_functions(package: Path) -> None:
    metrics = build_metrics(evaluation_with("loss", "spaced.plain:length", "exactMatch"))
    assert sorted(metrics) == ["exactMatch", "length"]
    assert metrics["length"]("four", "reference", {}) == 4.0


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (None, None),
        (True, True),
        (3, 3.0),
        (0.25, 0.25),
        (Fraction(1, 4), 0.25),
        (np.float32(0.25), 0.25),
        (np.bool_(False), False),
        (torch.tensor(0.25), 0.25),
    ],
)
def test_scores_of_all_number_types_are_accepted(
    value: object, score: float | None, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math, "value", value, raising=False)
    found = score_of(package, "return math.value")
    assert (type(found), found) == (type(score), score)


@pytest.mark.parametrize(
    ("body", "given"),
    [
        ("return 'good'", "'good'"),
        ("return math.nan", "nan"),
        ("return -math.inf", "-inf"),
        ("return 10 ** 400", "1000"),
        ("return [0.5]", r"\[0.5\]"),
        ("return 1j", "1j"),
    ],
)
def test_a_score_that_is_not_a_finite_number_is_rejected(package: Path, body: str, given: str) -> None:
    answer = r"for the answer 'an answer' to 'the reference'\. Return a finite number"
    with pytest.raises(JobError, match=f"^training.evaluation.metrics: judge:judge returned {given}.* {answer}"):
        score_of(package, body)


def test_an_exception_of_a_function_is_reported_with_the_answer(package: Path) -> None:
    message = (
        "judge:judge raised KeyError: 'database' for the answer 'an answer' to 'the reference'. Correct the function"
    )
    with pytest.raises(JobError, match=re.escape(message)) as raised:
        score_of(package, "return columns['database']")
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_function_cannot_change_the_columns(package: Path) -> None:
    with pytest.raises(JobError, match="raised TypeError: 'mappingproxy' object does not support item assignment"):
        score_of(package, "columns['column'] = 'other'")


def test_the_mean_score_does_not_depend_on_the_order() -> None:
    values = [1e16, 1.0, -1e16, 0.5, None, True]
    assert mean_score(values) == mean_score(values[::-1]) == 0.5
    with pytest.raises(JobError, match=r"training.evaluation.metrics: the sum of a metric's values exceeds"):
        mean_score([1e308, 1e308])


@pytest.mark.ray
@pytest.mark.long  # the tests above cover the parts; this one starts a whole run
def test_a_run_reports_the_score_of_a_function_on_the_python_path(runs: Runs, tmp_path: Path) -> None:
    rows = make_rows(save_tokenizer(tmp_path / "tokenizer"), "seq2seq", 20)
    columns = {"completion": "str", "database": "str", "input_ids": "ndarray:int32", "labels": "ndarray:int32"}
    with MDSWriter(out=str(tmp_path / "shards"), columns=columns, hashes=["xxh3_64"]) as writer:
        for row in rows:
            writer.write(row)
    (tmp_path / "judges.py").write_text("def age(answer, reference, columns):\n    return int(reference.split()[-1])")
    run = LiveRun(
        runs.empty("judged"),
        runs.job(
            dataset={"train": {"source": str(tmp_path / "shards")}, "eval": {"source": str(tmp_path / "shards")}},
            training={
                "epochs": 1,
                "warmupSteps": 0,
                "evaluation": {"generate": True, "metrics": ["exactMatch", "judges:age"], "maxNewTokens": 2},
            },
            workers={"count": 2, "gpus": 0},
        ),
        {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    try:
        run.start()
        code, output = run.wait()
    finally:
        run.clean_up()
    assert code == 0, output
    result = run.result()
    assert (result["exactMatch"], result["scores"]) == (0.0, {"age": 9.5})
    assert (files.read_json(run.directory.status) or {})["evalScores"] == {"exactMatch": 0.0, "age": 9.5}
    [evaluated] = run.events("evaluated")
    assert evaluated["scores"] == {"age": 9.5}
    assert re.search(r"^\s*age\s+9\.5\s*$", output, re.MULTILINE)
    assert "| age | 9.5 |" in (run.directory.export / "README.md").read_text()
