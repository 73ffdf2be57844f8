"""A job with all that is decided about where it runs: what every builder of children takes, and what it names them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from spotune.fingerprint import fingerprint
from spotune.job import API_VERSION, KIND, FinetuneJob
from spotune.job_file.load import SOURCE_FIELDS, resolve_paths
from spotune_operator.errors import SourceError
from spotune_operator.providers import Provider, refuse_unfit_class_name

JOB_LABEL: Final = "spotune.dev/job"
"""Label of everything that belongs to a job; its value is the job's name."""
DATA: Final = Path("/data")
"""Where the shared volume is mounted in all pods; relative sources of a job start here."""
RAY_VERSION: Final = "2.60.0"
"""Ray of the trainer's image that belongs to this version, as constraints/trainer.txt pins it."""
OPERATOR_NAMESPACE: Final = "spotune-system"
"""Where the chart installs the operator unless told otherwise."""
_FINGERPRINT_DIGITS = 8


@cache
def default_image() -> str:
    """The trainer's image that belongs to this version."""
    return f"spotune/trainer:{version('spotune')}"


@dataclass(frozen=True)
class PlacedJob:
    """A job, and where it runs. Made by ``place``.

    Attributes:
        job: With every path absolute, as the pods see them.
        provider: Whose nodes they run on.
        image: Of all containers.
        ray_version: Of that image.
        uid: Of the FinetuneJob in the cluster; empty for one that is in none, whose children then have no owner.
        operator_namespace: From where the operator asks for progress.
        monitoring_namespace: From where Prometheus reads metrics; empty: nowhere.
    """

    job: FinetuneJob
    provider: Provider
    image: str
    ray_version: str
    uid: str = ""
    operator_namespace: str = OPERATOR_NAMESPACE
    monitoring_namespace: str = ""

    @property
    def name(self) -> str:
        """Name of every child.

        The prefix makes it a name for Services, which KubeRay asks of clusters (a job may begin with a digit), and
        keeps KubeRay's Secret of the same name apart from one that the job itself names, such as ``hf``.
        """
        return f"spotune-{self.job.metadata.name}"

    @property
    def claim(self) -> str:
        """Name of the PersistentVolumeClaim of the shared volume."""
        return self.job.spec.storage.existing_claim or self.name

    @property
    def directory(self) -> Path:
        """The job's folder on the shared volume: another one for every meaning."""
        metadata = self.job.metadata
        return DATA / metadata.namespace / f"{metadata.name}-{fingerprint(self.job)[:_FINGERPRINT_DIGITS]}"

    @property
    def storage_class(self) -> str:
        """Storage class of the shared volume; empty: the cluster's default one."""
        return self.job.spec.storage.storage_class_name or self.provider.storage_class

    @property
    def selector(self) -> dict[str, str]:
        """Labels by which the job's pods are found."""
        return {JOB_LABEL: self.job.metadata.name}

    def labels(self, component: str) -> dict[str, str]:
        """Labels of a child or a pod; ``component`` is the part that it plays."""
        return {
            "app.kubernetes.io/name": "spotune",
            "app.kubernetes.io/instance": self.job.metadata.name,
            "app.kubernetes.io/component": component,
            "app.kubernetes.io/managed-by": "spotune",
            **self.selector,
        }

    def child(self, api_version: str, kind: str, component: str, *, owned: bool = True) -> dict[str, Any]:
        """Version, kind and metadata of a child.

        The owner reference lets the garbage collector take the child with the job. It does not block the job's
        deletion: nothing is to wait for us, and blocking needs a right to finalizers that the operator does without.
        """
        metadata: dict[str, Any] = {
            "name": self.name,
            "namespace": self.job.metadata.namespace,
            "labels": self.labels(component),
        }
        if owned and self.uid:
            owner = {"apiVersion": API_VERSION, "kind": KIND, "name": self.job.metadata.name, "uid": self.uid}
            metadata["ownerReferences"] = [owner | {"controller": True, "blockOwnerDeletion": False}]
        return {"apiVersion": api_version, "kind": kind, "metadata": metadata}


def place(
    job: FinetuneJob,
    provider: Provider,
    *,
    image: str = "",
    ray_version: str = "",
    uid: str = "",
    operator_namespace: str = OPERATOR_NAMESPACE,
    monitoring_namespace: str = "",
) -> PlacedJob:
    """Decides where a job runs, and refuses what cannot be there; the attributes of ``PlacedJob`` say what is what.

    Args:
        job: As it is in the cluster.
        provider: Whose nodes it runs on.
        image: For a job that names none; empty: the one that belongs to this version.
        ray_version: Of that image; empty: of the one that belongs to this version.
        uid: Of the FinetuneJob.
        operator_namespace: From where the operator asks for progress.
        monitoring_namespace: From where Prometheus reads metrics; empty: nowhere.

    Raises:
        SourceError: A source is in somebody's home folder.
        StorageClassError: The storage class is known not to do.
    """
    for path, source in _sources(job):
        if source.startswith("~"):
            reason = f"{source} is in a home folder, which pods have not: put it on the shared volume or in a bucket"
            raise SourceError(path, reason)
    refuse_unfit_class_name(provider, job.spec.storage.storage_class_name)
    cluster = job.spec.cluster
    return PlacedJob(
        job=resolve_paths(job, DATA),
        provider=provider,
        image=cluster.image or image or default_image(),
        ray_version=cluster.ray_version or ray_version or RAY_VERSION,
        uid=uid,
        operator_namespace=operator_namespace,
        monitoring_namespace=monitoring_namespace,
    )


def _sources(job: FinetuneJob) -> Iterator[tuple[str, str]]:
    """Path in camelCase and value of every source that the job names."""
    content = job.model_dump(mode="json")
    for path in SOURCE_FIELDS:
        value: Any = content
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value:
            yield path, value
