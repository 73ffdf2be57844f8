"""The claim of the shared volume, which holds checkpoints, logs, prepared data and the trained model."""

from typing import Any

from spotune_operator.children.resolved_job import ResolvedJob


def volume_claim(resolved: ResolvedJob) -> dict[str, Any] | None:
    """The PersistentVolumeClaim with ReadWriteMany; None if the job names an existing claim, or a bucket.

    With ``storage.retain`` it has no owner, so that it stays when the job is deleted.
    """
    storage = resolved.job.spec.storage
    if storage.existing_claim or storage.bucket:
        return None
    claim = resolved.child("v1", "PersistentVolumeClaim", "storage", owned=not storage.retain)
    claim["spec"] = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": str(storage.size)}}}
    if resolved.storage_class:
        claim["spec"]["storageClassName"] = resolved.storage_class
    return claim
