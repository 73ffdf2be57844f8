"""The rollout of a new version of the model beside the served one: its steps, its comparison, its end. Pure.

``weight`` is the percentage of requests that the candidate gets, and ``step`` the one that it gets next:

1. ``weight`` 0: the candidate is started with the replicas of the first step.
2. ``step`` above ``weight``: its replicas are started. Once they run, ``weight`` becomes ``step``.
3. ``step`` equal to ``weight``: the pause, in which the two versions are compared. Then ``step`` becomes the next one.
4. ``weight`` 100: the candidate is the served version. The former one *retires*: it finishes its requests.

A candidate that fails is rolled back, and retires if it has run. A new version needs a second Ray cluster, and gets no
comparison, if its claims are not mounted or pods change with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from spotune.service import (
    ModelServiceStatus,
    RejectedStatus,
    ReplicasSpec,
    RetiringVersionStatus,
    RolloutStatus,
    ServedVersionStatus,
)
from spotune.service.spec import ModelServiceSpec
from spotune.units.timestamps import rfc3339, unix_time
from spotune_operator.children.serving.groups import replicas_at
from spotune_operator.kube.conditions import Finding, find
from spotune_operator.kube.digest import digest
from spotune_operator.serving.comparison import compare_metric, describe, too_many_errors, too_slow
from spotune_operator.serving.gateway_stats import Traffic
from spotune_operator.serving.state import RayServiceState, last_line

ROLLED_OUT: Final = "RolledOut"
_CHECK_SECONDS: Final = 5.0
"""Interval of decisions during a rollout."""
_MAX_PAUSES: Final = 3
"""A step ends after so many pauses, even without enough requests for a comparison."""
_UNHEALTHY_SECONDS: Final = 60.0
"""A lost node makes an application unhealthy for a short time."""
_APPLIED_SECONDS: Final = 5.0
"""Requests that were assigned to a version before its weight changed have reached it after this time."""
_UNREADABLE_SECONDS: Final = 60.0
"""A switch at once does not wait longer for a gateway whose /stats cannot be read: it needs no comparison."""
_FAILED_STARTS: Final = re.compile(r"failed to start with exception\. Retrying (\d+) more time")
_MAX_RETRIES_LEFT: Final = 17
"""Of the 20 starts that Ray Serve tries, three have failed."""
_ALL: Final = 100


@dataclass(frozen=True)
class RolloutInput:
    """The input of the decision.

    Attributes:
        spec: The spec of the service.
        target: The version that it asks for.
        previous: The status of the last reconcile.
        ray: What KubeRay reports.
        traffic: What the gateways report.
        ready_replicas: Number of replicas of all versions in the active cluster that take requests.
        has_pods: Whether the RayService in the cluster has the newest pod templates, with the mounted claims.
        missing_claims: Claims of the target that the pods do not mount.
        now: Unix time.
    """

    spec: ModelServiceSpec
    target: ServedVersionStatus
    previous: ModelServiceStatus
    ray: RayServiceState
    traffic: Traffic
    ready_replicas: int
    has_pods: bool
    missing_claims: Sequence[str]
    now: float

    @property
    def is_settled(self) -> bool:
        """Whether there is one cluster, and it is not about to be replaced for its pods."""
        return self.has_pods and bool(self.ray.active_cluster) and not self.ray.is_upgrading

    @property
    def pause_seconds(self) -> float:
        """Seconds of a step."""
        return self.spec.rollout.pause.seconds

    @property
    def spec_digest(self) -> str:
        """Hash of ``spec.rollout``."""
        return digest(self.spec.rollout.model_dump(mode="json"))


@dataclass(frozen=True)
class Planned:
    """A version that runs.

    Attributes:
        version: The version.
        weight: Percent of the requests that it gets; None: it retires.
        replicas: Number of its replicas.
    """

    version: ServedVersionStatus
    weight: int | None
    replicas: ReplicasSpec


@dataclass(frozen=True)
class Rollout:
    """The decision: what runs, and the fields of the status.

    Attributes:
        versions: The versions that run, the served one first.
        model: The served version; None before the first one runs.
        pending: The version that is being deployed.
        status: The rollout in progress.
        rejected: The version that was rolled back last.
        retiring: Versions that finish their requests.
        finding: The condition ``RolledOut``; None: it stays as it is.
        requeue_after: Seconds until the next decision without an event; None: none is needed.
    """

    versions: Sequence[Planned]
    model: ServedVersionStatus | None
    pending: ServedVersionStatus | None = None
    status: RolloutStatus | None = None
    rejected: RejectedStatus | None = None
    retiring: Sequence[RetiringVersionStatus] = field(default_factory=tuple)
    finding: Finding | None = None
    requeue_after: float | None = None


def decide_rollout(given: RolloutInput) -> Rollout:
    """The decision about the versions of a service."""
    served, target, previous = _served_version(given), given.target, given.previous
    if served is None:
        return _switch(given, None, f"{target.name} is being deployed")
    if target.application == served.application:
        return _steady(given, served)
    rejected = previous.rejected
    tried = (rejected.application, rejected.rollout_spec) if rejected is not None else None
    if rejected is not None and tried == (target.application, given.spec_digest):
        return _keep(given, served, Finding(ROLLED_OUT, "False", "RolledBack", f"rolled back: {rejected.reason}"))
    metric = compare_metric(given.spec.rollout.promote_if, given.spec.model.finetune_job, target.scores, served.scores)
    if metric.is_missing:
        return _keep(given, served, Finding(ROLLED_OUT, "False", "MetricMissing", metric.message))
    if metric.is_worse:
        return _roll_back(given, served, f"{metric.message}; it got no requests")
    if not given.ray.active_cluster:
        return _switch(given, served, f"{target.name} is being deployed")
    if given.missing_claims:
        return _second_cluster(given, served, f"the pods do not mount the claim {given.missing_claims[0]}")
    if not given.is_settled or _is_switching(previous, target):
        return _second_cluster(given, served, "")
    return _in_place(given, served)


def _served_version(given: RolloutInput) -> ServedVersionStatus | None:
    """The version that gets the requests; None before the first one does, or if an older operator deployed it."""
    previous, ray, pending = given.previous, given.ray, given.previous.pending_model
    is_switched = given.is_settled and ray.is_current and previous.rollout is None
    if is_switched and pending is not None and pending.application in ray.applications:
        return pending
    return previous.model if previous.model is not None and previous.model.application else None


def _is_switching(previous: ModelServiceStatus, target: ServedVersionStatus) -> bool:
    """Whether a second cluster with this version is being brought up."""
    pending = previous.pending_model
    return previous.rollout is None and pending is not None and pending.application == target.application


def _switch(given: RolloutInput, served: ServedVersionStatus | None, message: str) -> Rollout:
    """Only the target runs: in the first cluster, or in a second one."""
    return Rollout(
        versions=[Planned(given.target, _ALL, given.spec.replicas)],
        model=served or given.previous.model,
        pending=given.target,
        finding=Finding(ROLLED_OUT, "False", "InProgress", message),
    )


def _second_cluster(given: RolloutInput, served: ServedVersionStatus, reason: str) -> Rollout:
    """The target replaces the served version in a second cluster. The condition keeps the reason of the first time."""
    message = f"{given.target.name} replaces {served.name} in a second Ray cluster, without a comparison"
    before = find(given.previous.conditions, ROLLED_OUT)
    if not reason and before is not None and before.message.startswith(message):
        return _switch(given, served, before.message)
    return _switch(given, served, f"{message}: {reason or 'the pods change, too'}")


def _steady(given: RolloutInput, served: ServedVersionStatus) -> Rollout:
    """The served version is the one that the spec asks for."""
    found = _keep(given, served, None)
    condition = find(given.previous.conditions, ROLLED_OUT)
    if condition is not None and condition.status == "True" and given.previous.model == served:
        return replace(found, rejected=None)
    cancelled = f"; the rollout of {given.previous.rollout.version} was cancelled" if given.previous.rollout else ""
    finding = Finding(ROLLED_OUT, "True", "Promoted", f"{served.name} gets all requests{cancelled}")
    return replace(found, finding=finding, rejected=None)


def _keep(given: RolloutInput, served: ServedVersionStatus, finding: Finding | None) -> Rollout:
    """Only the served version runs, besides those that retire; a candidate that runs is one of them."""
    return _with_retiring(given, Rollout([Planned(served, _ALL, given.spec.replicas)], served, finding=finding))


def _roll_back(given: RolloutInput, served: ServedVersionStatus, reason: str) -> Rollout:
    """The target is not tried again."""
    target = given.target
    rejected = RejectedStatus(
        version=target.version,
        application=target.application,
        reason=reason,
        time=rfc3339(given.now),
        rollout_spec=given.spec_digest,
    )
    kept = _keep(given, served, Finding(ROLLED_OUT, "False", "RolledBack", f"rolled back: {reason}"))
    return replace(kept, rejected=rejected)


def _with_retiring(given: RolloutInput, decided: Rollout) -> Rollout:
    """The decision with the versions that were given up, and finish their requests."""
    running = {planned.version.application for planned in decided.versions}
    left = [each for each in _given_up(given) if each.application not in running and not _has_finished(given, each)]
    if not given.is_settled:  # a second cluster runs none of them, and the first one keeps what it has
        left = []
    retiring = [Planned(each, None, _retiring_replicas(given, each)) for each in left]
    return replace(
        decided,
        versions=[*decided.versions, *retiring],
        retiring=left,
        rejected=decided.rejected or given.previous.rejected,
        requeue_after=_CHECK_SECONDS if left else decided.requeue_after,
    )


def _given_up(given: RolloutInput) -> Iterator[RetiringVersionStatus]:
    """The versions that may have running requests: retiring ones, the former model, and a former candidate."""
    previous = given.previous
    yield from previous.retiring
    known = {"", *(each.application for each in previous.retiring)}
    candidate = previous.pending_model if previous.rollout is not None else None
    for version in (previous.model, candidate):
        if version is None or version.application in known:
            continue
        if not given.ray.applications or version.application in given.ray.applications:  # empty: the head is not ready
            fields = version.model_dump() | {"since": rfc3339(given.now), "weight": _weight_of(given, version)}
            yield RetiringVersionStatus.model_validate(fields)


def _weight_of(given: RolloutInput, version: ServedVersionStatus) -> int:
    """The percentage of replicas that a version has when it is given up."""
    rollout = given.previous.rollout
    is_candidate = rollout is not None and rollout.application == version.application
    return max(rollout.weight, rollout.step) if rollout is not None and is_candidate else _ALL


def _retiring_replicas(given: RolloutInput, version: RetiringVersionStatus) -> ReplicasSpec:
    return replicas_at(given.spec.replicas, version.weight)


def _has_finished(given: RolloutInput, version: RetiringVersionStatus) -> bool:
    """Whether a retiring version has no running requests, or has had the time of the longest one."""
    since = unix_time(version.since) or 0.0
    if given.now - since >= given.spec.request_timeout.seconds:
        return True
    traffic = given.traffic
    is_newer = not traffic.error and traffic.polled_at >= since + _APPLIED_SECONDS
    return is_newer and not traffic.has_weight(version.name) and not traffic.running(version.name)


def _in_place(given: RolloutInput, served: ServedVersionStatus) -> Rollout:
    """One decision of a rollout in the running cluster."""
    target, spec, steps = given.target, given.spec, given.spec.rollout.steps
    rollout = given.previous.rollout
    if rollout is None or rollout.application != target.application:
        started = rfc3339(given.now)
        rollout = RolloutStatus(
            version=target.version, application=target.application, step=steps[0], step_started_at=started
        )
    rollout = _with_health(given, rollout)
    if failure := _failure(given, rollout, served):
        return _roll_back(given, served, failure)
    waits_for = ""
    if rollout.step > rollout.weight:
        waits_for = _not_ready(given, rollout)
        if not waits_for and rollout.step == _ALL:
            return _promote(given, served)
        if not waits_for:
            started = rfc3339(given.now)
            rollout = rollout.model_copy(update={"weight": rollout.step, "step_started_at": started})
            waits_for = f"it is compared for {spec.rollout.pause}"
    else:
        waits_for, slower = _paused(given, rollout, served)
        if slower:
            return _roll_back(given, served, slower)
        if not waits_for:
            step = next((each for each in steps if each > rollout.weight), _ALL)
            rollout = rollout.model_copy(update={"step": step})
            waits_for = f"its replicas for {step} % are starting"
    rollout = rollout.model_copy(update={"reason": waits_for})
    message = f"{target.name} gets {rollout.weight} % of the requests; {waits_for}"
    candidate = Planned(target, rollout.weight, replicas_at(spec.replicas, max(rollout.step, rollout.weight)))
    stable = Planned(served, _ALL - rollout.weight, spec.replicas)
    decided = Rollout(
        versions=[stable, candidate],
        model=served,
        pending=target,
        status=rollout,
        finding=Finding(ROLLED_OUT, "False", "InProgress", message),
        requeue_after=_CHECK_SECONDS,
    )
    return replace(_with_retiring(given, decided), rejected=None)


def _promote(given: RolloutInput, served: ServedVersionStatus) -> Rollout:
    """The candidate is the served version from now on."""
    target, rollout = given.target, given.previous.rollout
    compared = describe(given.traffic.of(target.name), given.traffic.of(served.name))
    is_compared = rollout is not None and rollout.weight > 0
    message = f"{target.name} gets all requests; " + (compared if is_compared else "it was not compared")
    planned = [Planned(target, _ALL, given.spec.replicas)]
    finding = Finding(ROLLED_OUT, "True", "Promoted", message)
    return replace(_with_retiring(given, Rollout(planned, target, finding=finding)), rejected=None)


def _with_health(given: RolloutInput, rollout: RolloutStatus) -> RolloutStatus:
    """The rollout with the time since which the candidate is unhealthy."""
    state = given.ray.applications.get(rollout.application)
    if state is None or state.status != "UNHEALTHY":
        return rollout.model_copy(update={"unhealthy_since": None})
    return rollout.model_copy(update={"unhealthy_since": rollout.unhealthy_since or rfc3339(given.now)})


def _failure(given: RolloutInput, rollout: RolloutStatus, served: ServedVersionStatus) -> str:
    """Why the candidate is rolled back at once; empty if it is not."""
    state = given.ray.applications.get(rollout.application)
    if state is not None:
        if state.status == "DEPLOY_FAILED":
            return f"it cannot be deployed: {last_line(state.message)}"
        retries = _FAILED_STARTS.search(state.message)
        if retries is not None and int(retries[1]) <= _MAX_RETRIES_LEFT:
            return f"its replicas fail to start: {last_line(state.message)}"
    unhealthy = unix_time(rollout.unhealthy_since)
    if unhealthy is not None and given.now - unhealthy >= _UNHEALTHY_SECONDS:
        detail = f": {last_line(state.message)}" if state is not None and state.message else ""
        return f"its replicas are unhealthy for {given.now - unhealthy:.0f} s{detail}"
    if problem := given.traffic.problem(given.target.name):
        return f"the gateway cannot read the model: {last_line(problem)}"
    if rollout.weight == 0:
        return ""
    candidate, stable = given.traffic.of(given.target.name), given.traffic.of(served.name)
    return too_many_errors(given.spec.rollout.promote_if, candidate, stable)


def _not_ready(given: RolloutInput, rollout: RolloutStatus) -> str:
    """What the next step waits for; empty once the candidate can take its share of the requests."""
    ray, spec = given.ray, given.spec
    state = ray.applications.get(rollout.application)
    if state is None or not ray.is_current:
        return "its Ray Serve application is not deployed yet"
    needed = spec.replicas.min + replicas_at(spec.replicas, rollout.step).min
    if given.ready_replicas < needed:
        return f"{given.ready_replicas} of {needed} replicas are ready"
    if state.status != "RUNNING" or not state.is_complete:
        detail = f": {last_line(state.message)}" if state.message else ""
        return f"its Ray Serve application is {state.status or 'not deployed yet'}{detail}"
    if given.traffic.lists(given.target.name, rollout.weight):
        return ""
    started = unix_time(rollout.step_started_at) or 0.0
    is_compared = len(spec.rollout.steps) > 1
    if not is_compared and given.traffic.error and given.now - started >= _UNREADABLE_SECONDS:
        return ""
    return given.traffic.error or given.traffic.list_problem or "the gateways have not loaded it yet"


def _paused(given: RolloutInput, rollout: RolloutStatus, served: ServedVersionStatus) -> tuple[str, str]:
    """What the pause waits for, empty at its end; and why the candidate is rolled back, empty if it is not."""
    condition, traffic = given.spec.rollout.promote_if, given.traffic
    elapsed = given.now - (unix_time(rollout.step_started_at) or 0.0)
    candidate, stable = traffic.of(given.target.name), traffic.of(served.name)
    if elapsed < given.pause_seconds:
        return f"it is compared for {given.spec.rollout.pause}", ""
    if traffic.error:
        return f"it cannot be compared: {traffic.error}", ""
    is_late = elapsed >= _MAX_PAUSES * given.pause_seconds
    if candidate.requests < condition.min_requests and not is_late:
        return f"it has had {candidate.requests:.0f} of {condition.min_requests} requests", ""
    return "", too_slow(condition, candidate, stable)
