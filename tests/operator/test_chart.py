"""Files generated from the chart's values and the operator's settings are current."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from charts import generate
from spotune_operator.runtime.metrics import Metrics
from spotune_operator.settings import PREFIX, Settings
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.supervisor import http_server as serve


@pytest.mark.parametrize("path", generate.files(), ids=lambda path: path.name)
def test_generated_files_are_current(path: Path) -> None:
    assert path.read_text() == generate.files()[path], "run `make manifests`"


def test_every_setting_is_the_charts_or_the_users() -> None:
    schema = json.loads((generate.CHART / "values.schema.json").read_text())
    users = schema["properties"]["settings"]["properties"]
    templates = (generate.CHART / "templates/_environment.tpl").read_text()
    for item in fields(Settings):
        if item.name in ("healing", "namespace", "host", "port"):  # a section of its own, the pod's, and fixed
            continue
        assert generate._camel(item.name) in users or f'"{item.name.upper()}"' in templates, item.name


def test_names_of_settings_become_the_operators_variables() -> None:
    schema = json.loads((generate.CHART / "values.schema.json").read_text())
    values = {"boolean": "true", "integer": "3", "number": "3", "string": "USD"}
    users = schema["properties"]["settings"]["properties"]
    for name, shape in users.items():
        snake = "".join(f"_{letter}" if letter.isupper() else letter.upper() for letter in name)
        Settings.from_environment({PREFIX + snake: values[shape["type"]]})


def test_rules_and_dashboard_use_existing_metrics() -> None:
    status = dict.fromkeys(serve._GAUGES, 1) | {
        "ageSeconds": 1,
        "lastCheckpoint": {"step": 1, "time": 1},
        "workers": {"running": 1},
        "restarts": {"workerLost": 1},
        "stepsLost": 1,
        "goodputParts": {"productive": 1},
        "phase": Phase.TRAINING,
    }
    served = "\n".join(serve.metrics_lines(status)) + Metrics().exposition().decode()
    asked = {
        name
        for template in ("rules", "dashboard")
        for name in re.findall(r"\bspotune_\w+", (generate.CHART / f"templates/{template}.yaml").read_text())
    }
    asked -= {"spotune_dev_job"}  # a label
    assert len(asked) > 10
    known = set(re.findall(r"^# TYPE (\S+)", served, re.MULTILINE))
    assert {name.removesuffix("_bucket") for name in asked} - known == set()


def test_value_without_a_comment_is_named() -> None:
    with pytest.raises(ValueError, match=r"image\.tag has no comment"):
        list(generate.documented("image:\n  # -- Where from.\n  repository: a\n  tag: b\n"))
