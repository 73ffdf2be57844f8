"""CEL rules of the storage section of FinetuneJobs, and those of it with other sections."""

from typing import Final

from spotune.crd.cel_rules import Rule
from spotune.job.storage import DEFAULT_SIZE

STORAGE_SECTION_RULES: Final = (
    Rule(
        "self.bucket != '' || !has(self.credentials)",
        "are for storage.bucket: set it, or use dataset.credentials for the data",
        "credentials",
    ),
    *(
        Rule(
            f"self.bucket == '' || self.{field} == '{default}'",
            "is for a volume, and storage.bucket needs none: remove one of them",
            field,
        )
        for field, default in {"existingClaim": "", "storageClassName": "", "size": DEFAULT_SIZE}.items()
    ),
    Rule("self.bucket == '' || self.retain", "false is for a volume; a bucket is kept: remove it", "retain"),
)

STORAGE_RULES: Final = (
    Rule(
        "!has(self.storage.credentials) || !has(self.dataset.credentials) || "
        "self.storage.credentials.endpoint == '' || self.dataset.credentials.endpoint == '' || "
        "self.storage.credentials.endpoint == self.dataset.credentials.endpoint",
        "differs from dataset.credentials.endpoint, and pods have one: keep data and state in one store",
        "storage.credentials.endpoint",
    ),
    Rule(
        "!has(self.serving) || self.storage.bucket == '' || self.storage.bucket.startsWith('s3://')",
        "reads models from s3:// only: use such a storage.bucket, or a volume",
        "serving",
    ),
)
