"""Thousands of generated specs: each is refused by the name of a field, or decided about.

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
from spotune_operator.observe.supervisor_status import PollResult, parse_progress
from spotune_operator.reconcile.decide import Decision, stalled
from tests.operator.support.generated_specs import Spec, generated, singles, specs
from tests.operator.support.malformed_responses import answers
from tests.operator.support.scenarios import Scenario

NUMBER = int(os.environ.get("SPOTUNE_TEST_SPECS", "100"))
several = settings(
    max_examples=NUMBER, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def job_of(spec: Spec) -> FinetuneJob:
    """The job, parsed as in a reconcile.

    Raises:
        JobError: The spec is invalid.
    """
    content = {"apiVersion": "spotune.dev/v1alpha1", "kind": "FinetuneJob", "metadata": {"name": "job"}, "spec": spec}
    document = Document(content)
    return parse_job(document)


def check_refusal(error: JobError) -> None:
    """A refusal names fields, and its status is valid."""
    assert error.problems
    assert all(problem.field.startswith("spec") and problem.message for problem in error.problems)
    status = stalled(FinetuneJobStatus(), error, 1, 1.8e9)
    condition = find(status.conditions, "Stalled")
    assert condition is not None
    assert (condition.status, status.phase) == ("True", "Stalled")
    assert error.problems[0].field in condition.message


def check_decision(decision: Decision) -> None:
    """A decision explains the state of the job, and its status and children are valid JSON."""
    conditions = decision.status.conditions
    ready = find(conditions, "Ready") or find(conditions, "Stalled")
    assert ready is not None
    assert ready.reason
    assert ready.message or ready.status == "False"
    assert decision.status.phase
    assert decision.requeue_after is None or decision.requeue_after >= 0
    for content in (decision.status.model_dump(mode="json", exclude_none=True), *decision.apply):
        assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert FinetuneJobStatus.model_validate(decision.status.model_dump(mode="json")) == decision.status


def run_through(job: FinetuneJob, answer: dict[str, Any]) -> None:
    """All decisions of a job from its creation to its end, with any response of the supervisor."""
    scenario = Scenario(job, observed=Observed())  # the classes are unknown, so none is missing
    check_decision(scenario.decide())
    check_decision(scenario.decide(after=1))
    scenario.has_children()
    scenario.has_pods()
    scenario.observe(poll=PollResult(parse_progress(answer), scenario.now))
    check_decision(scenario.decide(after=5))
    scenario.has_pods(workers=1, pending=1)
    scenario.supervisor_reports(step=3)
    check_decision(scenario.decide(after=3600))
    scenario.observe(poll=PollResult(parse_progress(answer), scenario.now))
    check_decision(scenario.decide(after=60))
    scenario.supervisor_reports("Done", "trained", step=9)
    check_decision(scenario.decide(after=60))
    before = scenario.status
    check_decision(scenario.decide())
    assert scenario.status == before, "nothing has changed"


PLAIN = {"model": {"source": "m"}, "dataset": {"train": {"source": "s"}}, "training": {"epochs": 1}}


def _with_memory(amount: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "ray-worker", "resources": {"requests": {"memory": amount}}}]}}


@several
@given(specs(), answers())
def test_spec_is_refused_by_name_or_handled(spec: Spec, answer: dict[str, Any]) -> None:
    try:
        run_through(job_of(spec), answer)
    except JobError as error:
        check_refusal(error)


def test_every_field_alone_is_refused_by_name_or_handled() -> None:
    """A sample of the more than 5,000 values of all fields, one at a time."""
    everything = list(singles())
    for spec in everything[:: max(1, len(everything) // NUMBER)]:
        try:
            run_through(job_of(spec), {})
        except JobError as error:
            check_refusal(error)
        except Exception as error:
            error.add_note(json.dumps(spec)[:2000])
            raise


@settings(several, max_examples=max(NUMBER // 5, 20))
@given(specs(), specs(), st.booleans())
def test_spec_that_changes_while_the_job_runs_is_refused_or_handled(first: Spec, second: Spec, has_pods: bool) -> None:
    try:
        scenario = Scenario(job_of(first), observed=Observed())
        scenario.decide()
    except JobError:
        return
    scenario.has_children()
    if has_pods:
        scenario.has_pods(workers=1)
        scenario.supervisor_reports(step=3)
        scenario.decide()
    before = scenario.status
    try:
        scenario.edit(job_of(second))
        check_decision(scenario.decide(after=1))
        check_decision(scenario.decide(after=3600))
    except JobError as error:
        check_refusal(error)
        status = stalled(before, error, 2, scenario.now)
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
def test_specs_that_once_broke_a_reconcile_are_refused_by_name(section: dict[str, Any], field: str) -> None:
    with pytest.raises(JobError) as raised:
        run_through(job_of({**PLAIN, "workers": section}), {})
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
