"""Objects of the API server, for the tests of the CLI."""

import json
from typing import Any

from spotune.units.timestamps import rfc3339
from spotune_operator.children.raycluster import Replicas, ray_cluster
from spotune_operator.children.resolved_job import ResolvedJob, resolve
from spotune_operator.providers import AKS
from tests.api.support.job_files import a_job

NOW = 1_767_323_045.0
"""2026-01-02T03:04:05Z."""
UID = "8a1f0c52-4a0c-4f0e-9a57-1d6f5c1f4d11"


def ago(seconds: float) -> str:
    """A time before NOW as Kubernetes writes it."""
    return rfc3339(NOW - seconds)


def condition(name: str, status: str, reason: str = "Reason", message: str = "") -> dict[str, Any]:
    """A condition whose last transition was a minute ago."""
    return {
        "type": name,
        "status": status,
        "reason": reason,
        "message": message,
        "observedGeneration": 2,
        "lastTransitionTime": ago(60),
    }


def finetune_job(*conditions: dict[str, Any], name: str = "t5-sql", **status: Any) -> dict[str, Any]:
    """A reconciled FinetuneJob, created an hour ago."""
    manifest = a_job().model_dump(mode="json", by_alias=True, exclude_unset=True)
    metadata = {"name": name, "namespace": "team", "uid": UID, "generation": 2, "creationTimestamp": ago(3600)}
    return {
        **manifest,
        "metadata": metadata,
        "status": {"observedGeneration": 2, "conditions": list(conditions), **status},
    }


def training_job(*conditions: dict[str, Any], **status: Any) -> dict[str, Any]:
    """A training FinetuneJob, with every metric in its status."""
    figures = {
        "phase": "Training",
        "generation": 3,
        "restarts": {"total": 3, "workerLost": 2, "hang": 1, "headLost": 0},
        "step": 1240,
        "totalSteps": 4800,
        "epoch": 0.775,
        "loss": 1.23456,
        "evalLoss": 1.5,
        "evalScores": {"exactMatch": 0.25},
        "tokensPerSecond": 12345.6,
        "mfu": 0.41,
        "eta": ago(-7500),
        "workers": "4/4",
        "lastCheckpoint": {"step": 1200, "time": ago(65)},
        "resumedFromStep": 900,
        "stepsLost": 37,
        "goodput": 0.934,
        "gpuSeconds": {"spot": 90_000, "onDemand": 600},
    }
    return finetune_job(*conditions, **{**figures, **status})


def pinned(**sections: Any) -> tuple[ResolvedJob, dict[str, Any]]:
    """A resolved job, and the pin in its status."""
    resolved = resolve(a_job(**sections), AKS, uid=UID)
    spec = ray_cluster(resolved, Replicas(2))["spec"]
    return resolved, {"image": resolved.image, "provider": "aks", "rayCluster": json.dumps(spec)}


def head_pod(uid: str = "1", **status: Any) -> dict[str, Any]:
    """A head pod with running containers."""
    running = [{"name": name, "state": {"running": {"startedAt": ago(30)}}} for name in ("ray-head", "supervisor")]
    metadata = {"name": f"spotune-t5-sql-head-{uid}", "namespace": "team", "uid": uid}
    return {"metadata": metadata, "status": {"phase": "Running", "containerStatuses": running, **status}}
