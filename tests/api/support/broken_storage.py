"""Job files whose storage is none, or does not fit the rest of the job."""

from __future__ import annotations

from typing import Final

WORKERS: Final = "  workers: {count: 2, min: 1}\n"
_KEPT: Final = "  storage: {bucket: s3://bucket/job, "
_FOR_A_VOLUME: Final = "is for a volume, and storage.bucket needs none: remove one of them"

# (what is broken, text of the valid file, what is there instead, what is printed after the file's name)
WRONG_STORAGE = [
    (
        "quantity",
        WORKERS,
        "  storage: {size: 200GB}\n",
        (
            ":10: spec.storage.size: expected a Kubernetes quantity such as 8, 500m, 64Gi or 1.5Ti "
            '(Gi is 1024^3, G is 1000^3; no B), not "200GB"'
        ),
    ),
    (
        "bucket of an unknown kind",
        WORKERS,
        "  storage: {bucket: hf://me/job}\n",
        (
            ":10: spec.storage.bucket: expected s3://bucket/prefix, gs://bucket/prefix or az://container/prefix, at "
            'most 240 characters, not "hf://me/job"'
        ),
    ),
    *(
        (f"bucket with {field}", WORKERS, f"{_KEPT}{field}: {value}}}\n", f":10: spec.storage.{field}: {_FOR_A_VOLUME}")
        for field, value in {"existingClaim": "mine", "storageClassName": "shared", "size": "10Gi"}.items()
    ),
    (
        "bucket that is deleted with the job",
        WORKERS,
        f"{_KEPT}retain: false}}\n",
        ":10: spec.storage.retain: false is for a volume; a bucket is kept: remove it",
    ),
    (
        "credentials without a bucket",
        WORKERS,
        "  storage: {credentials: {secretName: keys}}\n",
        ":10: spec.storage.credentials: are for storage.bucket: set it, or use dataset.credentials for the data",
    ),
    (
        "two endpoints",
        "seed: 1}\n",
        (
            "seed: 1}\n    credentials: {secretName: a, endpoint: http://a}\n"
            "  storage: {bucket: s3://b/job, credentials: {secretName: b, endpoint: http://b}}\n"
        ),
        (
            ":10: spec.storage.credentials.endpoint: differs from dataset.credentials.endpoint, and pods have one: "
            "keep data and state in one store"
        ),
    ),
    (
        "service of a model that no service can read",
        WORKERS,
        "  storage: {bucket: az://container/job}\n  serving: {}\n",
        ":11: spec.serving: reads models from s3:// only: use such a storage.bucket, or a volume",
    ),
    (
        "service that is deleted with its job",
        WORKERS,
        "  ttlSecondsAfterFinished: 60\n  serving: {}\n",
        ":10: spec.ttlSecondsAfterFinished: would delete the ModelService of spec.serving: remove one of the two",
    ),
]
