"""What a job is made into while neither its spec nor its pin changes: worked out once, looked at by every pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from spotune.job import FinetuneJob, PinnedStatus
from spotune_operator.children.config import JOB_FILE, config_map
from spotune_operator.children.monitoring import pod_monitor
from spotune_operator.children.network import network_policy
from spotune_operator.children.resolved_job import PlacedJob
from spotune_operator.children.storage import volume_claim
from spotune_operator.reconcile.pinned import pin, place_as_pinned, template_hashes
from spotune_operator.settings import Settings

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """A job with everything that follows from its spec alone.

    Attributes:
        placed: The job, and where it runs.
        pinned: What it is run with.
        templates: Hash of the pod template, by ``head`` or worker group.
        claim: The claim; None where the job brings its own.
        others: The children that are applied as they are at any time.
        job_file: SHA-256 of the job file that the supervisor is to work by.
    """

    placed: PlacedJob
    pinned: PinnedStatus
    templates: dict[str, str]
    claim: Manifest | None
    others: Sequence[Manifest]
    job_file: str

    @property
    def job(self) -> FinetuneJob:
        """The job."""
        return self.placed.job


def render(
    job: FinetuneJob, uid: str, pinned: PinnedStatus | None, provider_ids: Sequence[str], settings: Settings
) -> Rendered:
    """Work out what a job is made into.

    Args:
        job: A valid job.
        uid: Of the FinetuneJob.
        pinned: What it was run with so far.
        provider_ids: ``spec.providerID`` of the cluster's nodes.
        settings: The operator's.

    Raises:
        StalledError: The job asks for what cannot be.
    """
    placed = place_as_pinned(job, pinned, provider_ids, settings, uid)
    now_pinned = pin(placed, pinned, settings)
    config = config_map(placed)
    others = (config, network_policy(placed), pod_monitor(placed))
    return Rendered(
        placed=placed,
        pinned=now_pinned,
        templates=template_hashes(now_pinned),
        claim=volume_claim(placed),
        others=[manifest for manifest in others if manifest is not None],
        job_file=sha256(config["data"][JOB_FILE].encode()).hexdigest(),
    )
