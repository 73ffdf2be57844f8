"""What the operator may do by its chart, and what it did by the API server's audit log: one should be the other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.chart import rendered
from tests.cluster.operator_install import DEPLOYMENT

USER = "system:serviceaccount:spotune-system:spotune-operator"
_CREATED = 201


class Right(NamedTuple):
    """One verb on one kind; `resource` has its subresource behind a slash."""

    group: str
    resource: str
    verb: str


def granted(*values: str) -> set[Right]:
    """What the operator may do, installed with values such as `healing.cordon=true`."""
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
    """The rights that the operator has used. An object that an apply has created needed the right to create it, too."""
    return {right for event in _events(log) for right in _rights(event)}


def refused(log: Path) -> list[str]:
    """What the operator asked for without having the right to."""
    return [
        f"{event['verb']} {event['requestURI']}"
        for event in _events(log)
        # Admission answers 403, too: a quota, a namespace that is being deleted.
        if event.get("annotations", {}).get("authorization.k8s.io/decision") == "forbid"
    ]


def _events(log: Path) -> Iterable[dict[str, Any]]:
    for path in sorted(log.parent.glob(f"{log.stem}*{log.suffix}")):  # rotated ones, too
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
