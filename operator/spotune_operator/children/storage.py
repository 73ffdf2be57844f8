"""The claim for the shared volume: checkpoints, logs, prepared data and the trained model."""

from typing import Any

from spotune_operator.children.resolved_job import PlacedJob


def volume_claim(placed: PlacedJob) -> dict[str, Any] | None:
    """A PersistentVolumeClaim with ReadWriteMany; None where the job brings its own.

    A volume that is to be retained has no owner, so that it stays when the job goes.
    """
    storage = placed.job.spec.storage
    if storage.existing_claim:
        return None
    claim = placed.child("v1", "PersistentVolumeClaim", "storage", owned=not storage.retain)
    claim["spec"] = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": str(storage.size)}}}
    if placed.storage_class:
        claim["spec"]["storageClassName"] = placed.storage_class
    return claim
