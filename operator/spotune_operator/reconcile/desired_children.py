"""The desired children of a job: they follow from its spec and its pin, and are cached until one of these changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from spotune.job import FinetuneJob, PinnedStatus
from spotune_operator.children.config import JOB_FILE, config_map
from spotune_operator.children.model_service import model_service
from spotune_operator.children.monitoring import pod_monitor
from spotune_operator.children.network import network_policy
from spotune_operator.children.resolved_job import ResolvedJob
from spotune_operator.children.storage import volume_claim
from spotune_operator.observe.caches import CachedJob
from spotune_operator.observe.state import JobKey
from spotune_operator.reconcile.pinned import pin, resolve_as_pinned, template_hashes
from spotune_operator.settings import Settings

Manifest = dict[str, Any]

_MAX_CACHED: Final = 200
"""Jobs without a head pod beyond this number are evicted from the cache; jobs with one stay."""


@dataclass(frozen=True)
class DesiredChildren:
    """A job and its desired children.

    Attributes:
        resolved: The job with all defaults resolved.
        pinned: The pinned image and RayCluster.
        templates: Hash of the pod template, by ``head`` or worker group.
        claim: The PersistentVolumeClaim; None if the job names an existing one.
        others: The children that do not depend on the observed state: ConfigMap, NetworkPolicy, PodMonitor.
        service: The ModelService; None without ``spec.serving``.
        job_file: SHA-256 of the job file for the supervisor.
    """

    resolved: ResolvedJob
    pinned: PinnedStatus
    templates: dict[str, str]
    claim: Manifest | None
    others: Sequence[Manifest]
    service: Manifest | None
    job_file: str

    @property
    def job(self) -> FinetuneJob:
        """The job."""
        return self.resolved.job


def render(
    job: FinetuneJob, uid: str, pinned: PinnedStatus | None, provider_ids: Sequence[str], settings: Settings
) -> DesiredChildren:
    """Render the desired children of a job.

    Args:
        job: A valid job.
        uid: ``metadata.uid`` of the FinetuneJob.
        pinned: The pin in its status; None before the first reconcile.
        provider_ids: ``spec.providerID`` of the cluster's nodes.
        settings: The operator's.

    Raises:
        StalledError: The spec cannot be applied in this cluster.
    """
    resolved = resolve_as_pinned(job, pinned, provider_ids, settings, uid)
    now_pinned = pin(resolved, pinned, settings)
    config = config_map(resolved)
    others = (config, network_policy(resolved), pod_monitor(resolved))
    return DesiredChildren(
        resolved=resolved,
        pinned=now_pinned,
        templates=template_hashes(now_pinned),
        claim=volume_claim(resolved),
        others=[manifest for manifest in others if manifest is not None],
        service=model_service(resolved),
        job_file=sha256(config["data"][JOB_FILE].encode()).hexdigest(),
    )


class DesiredChildrenCache:
    """The desired children of jobs, by uid and generation.

    Args:
        must_keep: Whether a job is never evicted: one with a head pod is reconciled often.
    """

    def __init__(self, must_keep: Callable[[JobKey], bool]) -> None:
        self._must_keep = must_keep
        self._entries: dict[JobKey, tuple[str, int, DesiredChildren]] = {}

    def get(self, job: CachedJob, pinned: PinnedStatus | None) -> DesiredChildren | None:
        """The desired children of this generation of a job with this pin; None if they are not cached."""
        entry = self._entries.get(job.key)
        if entry is None or entry[:2] != (job.uid, job.generation) or entry[2].pinned != pinned:
            return None
        return entry[2]

    def put(self, job: CachedJob, desired: DesiredChildren) -> None:
        """Cache the desired children of a job; may evict the oldest entry that need not be kept."""
        self._entries.pop(job.key, None)
        self._entries[job.key] = job.uid, job.generation, desired
        if len(self._entries) > _MAX_CACHED:
            evicted = next((key for key in self._entries if not self._must_keep(key)), None)
            if evicted is not None:
                del self._entries[evicted]

    def forget(self, key: JobKey) -> None:
        """Forget a deleted job."""
        self._entries.pop(key, None)
