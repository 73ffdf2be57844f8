"""Thousands of generated specs through the models and the decision: refused by the name of a field, or handled.

`SPOTUNE_TEST_SPECS=10000` tries so many (some minutes); by default a few dozen.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotune.errors import JobError
from spotune.job import FinetuneJob, FinetuneJobStatus
from spotune.job_file.load import parse_job
from spotune.job_file.yaml_file import Document
from spotune_operator.kube.conditions import find
from spotune_operator.observe.state import Observed
from spotune_operator.observe.supervisor_status import Reading, understood
from spotune_operator.reconcile.decide import Decision, stalled
from tests.operator.support.generated_specs import Spec, generated, singles, specs
from tests.operator.support.malformed_responses import answers
from tests.operator.support.scenarios import Life

NUMBER = int(os.environ.get("SPOTUNE_TEST_SPECS", "100"))
several = settings(
    max_examples=NUMBER, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def job_of(spec: Spec) -> FinetuneJob:
    """The job, as a pass reads it.

    Raises:
        JobError: It cannot be run.
    """
    content = {"apiVersion": "spotune.dev/v1alpha1", "kind": "FinetuneJob", "metadata": {"name": "job"}, "spec": spec}
    document = Document(content)
    return parse_job(document)


def check_refusal(error: JobError) -> None:
    """A refusal names fields, and the status made of it is one that the API server takes."""
    assert error.problems
    assert all(problem.field.startswith("spec") and problem.message for problem in error.problems)
    status = stalled(FinetuneJobStatus(), error, 1, 1.8e9)
    condition = find(status.conditions, "Stalled")
    assert condition is not None
    assert (condition.status, status.phase) == ("True", "Stalled")
    assert error.problems[0].field in condition.message


def check_decision(decision: Decision) -> None:
    """A decision says why the job is as it is, in a status and children that are JSON."""
    conditions = decision.status.conditions
    ready = find(conditions, "Ready") or find(conditions, "Stalled")
    assert ready is not None
    assert ready.reason
    assert ready.message or ready.status == "False"
    assert decision.status.phase
    assert decision.again_after is None or decision.again_after >= 0
    for content in (decision.status.model_dump(mode="json", exclude_none=True), *decision.apply):
        assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert FinetuneJobStatus.model_validate(decision.status.model_dump(mode="json")) == decision.status


def live(job: FinetuneJob, answer: dict[str, Any]) -> None:
    """The decisions from nothing over a head, workers and a supervisor that says anything to the end."""
    life = Life(job, seen=Observed())  # classes are not known, so none is missing
    check_decision(life.decide())
    check_decision(life.decide(after=1))
    life.has_children()
    life.has_pods()
    life.see(reading=Reading(understood(answer), life.now))
    check_decision(life.decide(after=5))
    life.has_pods(workers=1, pending=1)
    life.supervisor_says(step=3)
    check_decision(life.decide(after=3600))
    life.see(reading=Reading(understood(answer), life.now))
    check_decision(life.decide(after=60))
    life.supervisor_says("Done", "trained", step=9)
    check_decision(life.decide(after=60))
    before = life.status
    check_decision(life.decide())
    assert life.status == before, "nothing has happened, so nothing is said"


PLAIN = {"model": {"source": "m"}, "dataset": {"train": {"source": "s"}}, "training": {"epochs": 1}}


def _with_memory(amount: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "ray-worker", "resources": {"requests": {"memory": amount}}}]}}


@several
@given(specs(), answers())
def test_spec_is_refused_by_name_or_handled(spec: Spec, answer: dict[str, Any]) -> None:
    try:
        live(job_of(spec), answer)
    except JobError as error:
        check_refusal(error)


def test_every_field_alone_is_refused_by_name_or_handled() -> None:
    """Of 5,000 and more values for the fields, one by one, as many as are asked for."""
    everything = list(singles())
    for spec in everything[:: max(1, len(everything) // NUMBER)]:
        try:
            live(job_of(spec), {})
        except JobError as error:
            check_refusal(error)
        except Exception as error:
            error.add_note(json.dumps(spec)[:2000])
            raise


@settings(several, max_examples=max(NUMBER // 5, 20))
@given(specs(), specs(), st.booleans())
def test_spec_that_changes_while_the_job_runs_is_refused_or_handled(first: Spec, second: Spec, has_pods: bool) -> None:
    try:
        life = Life(job_of(first), seen=Observed())
        life.decide()
    except JobError:
        return
    life.has_children()
    if has_pods:
        life.has_pods(workers=1)
        life.supervisor_says(step=3)
        life.decide()
    before = life.status
    try:
        life.edit(job_of(second))
        check_decision(life.decide(after=1))
        check_decision(life.decide(after=3600))
    except JobError as error:
        check_refusal(error)
        status = stalled(before, error, 2, life.now)
        assert (status.step, status.pinned, status.observed_generation) == (before.step, before.pinned, 2)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"resources": {"requests": {"memory": "1e400"}}}, "spec.workers.resources.requests.memory"),
        ({"resources": {"limits": {"cpu": "9" * 400}}}, "spec.workers.resources.limits.cpu"),
        ({"podTemplate": _with_memory("many")}, "spec.workers.podTemplate"),
        ({"podTemplate": _with_memory([1])}, "spec.workers.podTemplate"),
    ],
)
def test_what_once_broke_a_pass_is_refused_by_name(section: dict[str, Any], field: str) -> None:
    with pytest.raises(JobError) as raised:
        live(job_of({**PLAIN, "workers": section}), {})
    assert raised.value.problems[0].field == field


def test_generated_specs_are_of_both_kinds() -> None:
    """Or the tests above would show little. Hypothesis also draws from constants of loaded modules: numbers vary."""
    kinds: Counter[str] = Counter()
    for spec in generated(100):
        given_before = deepcopy(spec)
        try:
            job_of(spec)
        except JobError:
            kinds["refused"] += 1
        else:
            kinds["valid"] += 1
        assert spec == given_before
    assert min(kinds["refused"], kinds["valid"]) >= 10, kinds
