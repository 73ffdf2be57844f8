"""The observed state of the ModelServices that the operator created for jobs with ``spec.serving``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spotune_operator.children.resolved_job import JOB_LABEL
from spotune_operator.kube.conditions import referenced, with_cause
from spotune_operator.kube.digest import content_digest


@dataclass(frozen=True)
class JobService:
    """A ModelService with the label of a job.

    Attributes:
        namespace: Its namespace.
        name: Its name.
        uid: Its uid.
        job: Name of the job.
        owner: uid of the object that controls it; empty without one.
        digest: Hash of everything that a user or the operator may write.
        deleting: Whether it is being deleted.
        url: ``status.url``; empty before it is known.
        ready: Whether its condition ``Ready`` is true.
        reason: Reason of that condition; empty before the first reconcile.
        message: Message of that condition, with the cause in place of a reference to another condition.
    """

    namespace: str
    name: str
    uid: str
    job: str
    owner: str = ""
    digest: str = ""
    deleting: bool = False
    url: str = ""
    ready: bool = False
    reason: str = ""
    message: str = ""


def job_service_view(raw: Mapping[str, Any]) -> JobService:
    """The view of a ModelService."""
    metadata, status = raw["metadata"], raw.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    ready = conditions.get("Ready", {})
    message = str(ready.get("message", ""))
    cause = conditions.get(referenced(message), {}).get("message")
    return JobService(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        job=(metadata.get("labels") or {}).get(JOB_LABEL, ""),
        owner=controller_uid(raw),
        digest=content_digest(raw),
        deleting="deletionTimestamp" in metadata,
        url=str(status.get("url", "")),
        ready=ready.get("status") == "True",
        reason=str(ready.get("reason", "")),
        message=with_cause(message, cause),
    )


def controller_uid(raw: Mapping[str, Any]) -> str:
    """The uid of the owner that controls an object; empty without one."""
    owners = raw["metadata"].get("ownerReferences") or ()
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")
