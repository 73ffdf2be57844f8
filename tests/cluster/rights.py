"""The operator's rights: those that the chart grants, and those used according to the API server's audit log."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.chart import rendered
from tests.cluster.operator_install import DEPLOYMENT

USER = "system:serviceaccount:spotune-system:spotune-operator"
_CREATED = 201


class Right(NamedTuple):
    """One verb on one kind; `resource` may end with a slash and a subresource."""

    group: str
    resource: str
    verb: str


FOR_SWEEPS = frozenset(
    {
        Right("spotune.dev", "finetunejobs", "create"),
        Right("spotune.dev", "finetunejobs", "patch"),
        Right("spotune.dev", "finetunesweeps/status", "patch"),
    }
)
"""Rights that only sweeps need: test_sweep.py uses them."""
FOR_TTL = frozenset(
    {Right("spotune.dev", "finetunejobs", "delete"), Right("spotune.dev", "finetunesweeps", "delete")},
)
"""Rights that only `ttlSecondsAfterFinished` needs, which no test on the cluster sets."""


def granted(*values: str) -> set[Right]:
    """The rights that the chart grants with values such as `healing.cordon=true`."""
    roles = [found for found in rendered(*values) if found["kind"] in ("ClusterRole", "Role")]
    return {
        Right(group, resource, verb)
        for role in roles
        if role["metadata"]["name"] == DEPLOYMENT
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(log: Path) -> set[Right]:
    """The rights that the operator has used. An apply that creates an object also needs the right `create`."""
    return {right for event in _events(log) for right in _rights(event)}


def refused(log: Path, replaced: Mapping[str, float]) -> list[str]:
    """Requests of the operator for which it has no right.

    Args:
        log: The audit log.
        replaced: Pods of the operator by name, with the time since which their requests do not count.
    """
    return [
        f"{event['verb']} {event['requestURI']}"
        for event in _events(log)
        # Admission returns 403 as well: a quota, or a namespace that is being deleted.
        if event.get("annotations", {}).get("authorization.k8s.io/decision") == "forbid"
        and _time(event) < replaced.get(_pod(event), math.inf)
    ]


def _time(event: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp()


def _pod(event: Mapping[str, Any]) -> str:
    """Name of the pod whose token a request had."""
    names: list[str] = event["user"].get("extra", {}).get("authentication.kubernetes.io/pod-name", [""])
    return names[0]


def _events(log: Path) -> Iterable[dict[str, Any]]:
    for path in sorted(log.parent.glob(f"{log.stem}*{log.suffix}")):  # including rotated ones
        with path.open() as lines:
            for line in lines:
                event = json.loads(line)
                if event["user"].get("username") == USER and "objectRef" in event:
                    yield event


def _rights(event: Mapping[str, Any]) -> Iterable[Right]:
    about = event["objectRef"]
    resource = "/".join(filter(None, (about["resource"], about.get("subresource"))))
    group = about.get("apiGroup", "")
    yield Right(group, resource, event["verb"])
    if event["verb"] == "patch" and event.get("responseStatus", {}).get("code") == _CREATED:
        yield Right(group, resource, "create")
