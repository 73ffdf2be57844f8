"""The resolved job: the spec with all defaults resolved, and the names and labels of its children."""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from spotune.custom_resource.object_names import JOB_LABEL as JOB_LABEL
from spotune.fingerprint import fingerprint
from spotune.job import KIND, FinetuneJob
from spotune.job_file.load import resolve_paths, sources_of
from spotune_operator.children.owner import Owner
from spotune_operator.errors import SourceError
from spotune_operator.providers import Provider, refuse_unfit_class_name
from spotune_operator.settings import OPERATOR_NAMESPACE

DATA: Final = Path("/data")
"""Mount path in all pods of the shared volume, or with a bucket of the pod's own; relative sources of a job are
relative to it."""
RAY_VERSION: Final = "2.60.0"
"""Version of Ray in this version's image of the trainer, as pinned in constraints/trainer.txt."""
_FINGERPRINT_DIGITS = 8
_IN_THE_IMAGE: Final = (
    "put it into the image (cluster.image) and give its absolute path there, or leave it out if Python finds the module"
)


@cache
def default_image() -> str:
    """This version's image of the trainer."""
    return f"spotune/trainer:{version('spotune')}"


@dataclass(frozen=True)
class ResolvedJob:
    """A job with all defaults resolved. Made by ``resolve``.

    Attributes:
        job: The job with absolute paths, as in the pods.
        provider: Provider of the nodes.
        image: Image of all containers.
        ray_version: Version of Ray in that image.
        uid: ``metadata.uid`` of the FinetuneJob; empty outside a cluster: the children then have no owner.
        operator_namespace: Namespace of the operator, which polls the progress.
        monitoring_namespace: Namespace of the Prometheus that scrapes the pods; empty: none.
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

        The prefix makes it a valid name of a Service, as KubeRay requires (the name of a job may begin with a digit),
        and avoids a collision of KubeRay's Secret of that name with one that the job names, such as ``hf``.
        """
        return f"spotune-{self.job.metadata.name}"

    @property
    def claim(self) -> str:
        """Name of the PersistentVolumeClaim of the shared volume."""
        return self.job.spec.storage.existing_claim or self.name

    @property
    def bucket(self) -> str:
        """URL of the bucket that keeps the job, without a slash at its end; empty: the shared volume keeps it."""
        return self.job.spec.storage.bucket.rstrip("/")

    @property
    def output(self) -> str:
        """URL of the trained model."""
        return f"{self.bucket or f'pvc://{self.claim}/{self.directory.relative_to(DATA)}'}/export"

    @property
    def directory(self) -> Path:
        """The job's directory in its pods; its name contains the fingerprint of the spec.

        It is on the shared volume. With a bucket, each pod has its own.
        """
        metadata = self.job.metadata
        return DATA / metadata.namespace / f"{metadata.name}-{fingerprint(self.job)[:_FINGERPRINT_DIGITS]}"

    @property
    def storage_class(self) -> str:
        """Storage class of the shared volume; empty: the cluster's default one."""
        return self.job.spec.storage.storage_class_name or self.provider.storage_class

    @property
    def owner(self) -> Owner:
        """The job as the owner of its children."""
        metadata = self.job.metadata
        return Owner(KIND, metadata.name, metadata.namespace, JOB_LABEL, self.name, self.uid)

    @property
    def selector(self) -> dict[str, str]:
        """The label that all objects of the job have."""
        return self.owner.selector

    def labels(self, component: str) -> dict[str, str]:
        """Labels of a child or a pod; ``component`` is its role in the job."""
        return self.owner.labels(component)

    def child(self, api_version: str, kind: str, component: str, *, owned: bool = True) -> dict[str, Any]:
        """API version, kind and metadata of a child."""
        return self.owner.child(api_version, kind, component, owned=owned)


def resolve(
    job: FinetuneJob,
    provider: Provider,
    *,
    image: str = "",
    ray_version: str = "",
    uid: str = "",
    operator_namespace: str = OPERATOR_NAMESPACE,
    monitoring_namespace: str = "",
) -> ResolvedJob:
    """Resolve the defaults of a job, and refuse fields that cannot work in a cluster.

    Args:
        job: The job.
        provider: Provider of the nodes.
        image: Default image; empty: this version's.
        ray_version: Version of Ray in that image; empty: this version's.
        uid: ``metadata.uid`` of the FinetuneJob.
        operator_namespace: Namespace of the operator.
        monitoring_namespace: Namespace of the Prometheus that scrapes the pods; empty: none.

    Raises:
        SourceError: A source is in a home folder.
        StorageClassError: The storage class is known to be unfit.
    """
    for path, source in sources_of(job).items():
        if source.startswith("~"):
            reason = f"{source} is in a home folder, which pods do not have: put it on the shared volume or in a bucket"
            raise SourceError(path, reason)
        if job.spec.storage.bucket and "://" not in source and not source.startswith("/"):
            reason = f"{source} is relative to the shared volume, which a job with storage.bucket has not"
            remedy = _IN_THE_IMAGE if path == "spec.training.code" else "use a URL"
            raise SourceError(path, f"{reason}: {remedy}")
    refuse_unfit_class_name(provider, job.spec.storage.storage_class_name)
    cluster = job.spec.cluster
    return ResolvedJob(
        job=resolve_paths(job, DATA),
        provider=provider,
        image=cluster.image or image or default_image(),
        ray_version=cluster.ray_version or ray_version or RAY_VERSION,
        uid=uid,
        operator_namespace=operator_namespace,
        monitoring_namespace=monitoring_namespace,
    )
