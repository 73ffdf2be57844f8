"""Where a job keeps its state: on a shared volume of the cluster, or in a bucket."""

from typing import Annotated, Final, Self

from pydantic import model_validator

from spotune.custom_resource.base import Section, invalid
from spotune.service.field_types import Form
from spotune.units.quantities import Quantity

DEFAULT_SIZE: Final = "200Gi"
_NAME = r"[A-Za-z0-9][A-Za-z0-9.-]*"
_PREFIX = r"(/[A-Za-z0-9._=+@,:-]+)*/?"

BucketUrl = Annotated[
    str,
    Form(
        f"((s3|gs|az)://{_NAME}{_PREFIX})?",
        "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix, at most 240 characters",
        240,
    ),
]
"""A folder in a bucket, or an empty string."""


class CredentialsSpec(Section):
    """Access to an object store."""

    secret_name: str
    """Secret in the job's namespace. Its keys become environment variables of the pods."""
    endpoint: str = ""
    """URL of an S3-compatible store. Empty: the provider's default."""


class StorageSpec(Section):
    """Where checkpoints, logs and the trained model are kept: on a shared volume, or in a bucket."""

    bucket: BucketUrl = ""
    """Bucket that keeps the job in place of a shared volume, such as s3://bucket/prefix; also gs:// and az://. One
    prefix holds one job. What is in it stays when the job is deleted. Frozen after the first checkpoint. On one machine
    `spotune run` uses it, too, unless --bucket names another one."""
    credentials: CredentialsSpec | None = None
    """Credentials for the bucket. If absent: those of dataset.credentials, or the workload identity of
    workers.serviceAccountName."""
    storage_class_name: str = ""
    """StorageClass that supports ReadWriteMany. Empty: the provider's default class."""
    size: Quantity = Quantity(DEFAULT_SIZE)
    """Size of the volume, such as 200Gi."""
    existing_claim: str = ""
    """Name of an existing PersistentVolumeClaim to use instead of creating one."""
    retain: bool = True
    """Keep the volume when the job is deleted."""

    @model_validator(mode="after")
    def _check_bucket(self) -> Self:
        if not self.bucket:
            if self.credentials is not None:
                invalid("credentials", "are for storage.bucket: set it, or use dataset.credentials for the data")
            return self
        for field, is_given in {
            "existingClaim": bool(self.existing_claim),
            "storageClassName": bool(self.storage_class_name),
            "size": str(self.size) != DEFAULT_SIZE,
        }.items():
            if is_given:
                invalid(field, "is for a volume, and storage.bucket needs none: remove one of them")
        if not self.retain:
            invalid("retain", "false is for a volume; a bucket is kept: remove it")
        return self
