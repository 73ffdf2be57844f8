"""One level-triggered reconcile of one job: observe, decide, write the status, execute the decision.

A reconcile may run at any time, run twice, and stop at any point. The reconciler keeps no state that matters: it
remembers what it applied only to avoid applying it again while neither the manifest nor the object has changed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from spotune.errors import JobError
from spotune.job import FinetuneJob, FinetuneJobStatus
from spotune.job_file.load import parse_job
from spotune_operator.errors import RefusedError
from spotune_operator.kube.applier import ChildApplier
from spotune_operator.kube.client import CHILDREN, FINETUNE_JOBS, MODEL_SERVICES, Kube, Manifest
from spotune_operator.kube.phase_change import OnPhaseChange, ignore
from spotune_operator.kube.pod_deletion import delete_gracefully, force_delete
from spotune_operator.kube.status_writer import StatusWriter
from spotune_operator.kueue.scaling import is_queued, scale_operations
from spotune_operator.observe.caches import CachedJob, Caches
from spotune_operator.observe.existing_claims import ExistingClaims
from spotune_operator.observe.job_services import controller_uid
from spotune_operator.observe.newer_definition import parse_known, parse_status, runs_as_reconciled
from spotune_operator.observe.state import Child, JobKey, Observed
from spotune_operator.observe.supervisor_poller import Poller
from spotune_operator.reconcile.decide import Decision, decide, decide_stalled
from spotune_operator.reconcile.desired_children import DesiredChildren, DesiredChildrenCache, render
from spotune_operator.reconcile.events import job_events
from spotune_operator.reconcile.job_serving import not_of_this_job
from spotune_operator.reconcile.restart_metrics import RestartMetrics
from spotune_operator.runtime.metrics import Metrics
from spotune_operator.settings import Settings

logger = logging.getLogger(__name__)


class Reconciler:
    """Reconciles jobs.

    Args:
        kube: The API server.
        caches: The observed objects.
        poller: The progress of the supervisors.
        settings: The operator's.
        metrics: Counts reconciles by result.
        clock: Returns Unix time.
        phase_changed: Called after a status with another phase was written.
    """

    def __init__(
        self,
        kube: Kube,
        caches: Caches,
        poller: Poller,
        settings: Settings,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
        phase_changed: OnPhaseChange = ignore,
    ) -> None:
        self._kube = kube
        self._caches = caches
        self._poller = poller
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._restarts = RestartMetrics(metrics, clock)
        self._status: StatusWriter[CachedJob, FinetuneJobStatus] = StatusWriter(
            kube,
            FINETUNE_JOBS,
            lambda job, previous, status: job_events(job, previous, status, clock()),
            self._written,
            phase_changed,
        )
        self._desired = DesiredChildrenCache(must_keep=poller.is_polling)
        self._applier = ChildApplier(kube, caches.version_of)
        self._claims = ExistingClaims(kube, settings.rejected_retry_seconds, clock)
        self._refused: dict[JobKey, dict[str, str]] = {}
        self._last_change: dict[JobKey, tuple[int, float]] = {}

    async def reconcile(self, key: JobKey) -> float | None:
        """Reconcile a job.

        Returns:
            Seconds until the next reconcile without an event; None: none is needed.

        Raises:
            KubernetesError: The API server failed: reconcile again.
        """
        job = self._caches.job(key)
        if job is None or job.deleting:
            self._forget(key)
            return None
        missing_claims = await self._missing_claims(job)
        previous = parse_status(FinetuneJobStatus, job.status)
        observed = self._observe(job, previous, missing_claims)
        result = "ok"
        try:
            decision = decide(
                self._desired_children(job, previous, observed),
                generation=job.generation,
                previous=previous,
                observed=observed,
                now=self._clock(),
                settings=self._settings,
            )
        except JobError as error:
            result = "stalled"
            decision = decide_stalled(
                error,
                generation=job.generation,
                previous=previous,
                observed=observed,
                now=self._clock(),
                settings=self._settings,
            )
        # The status first: it records what later reconciles rely on (the preflight passed, the model is trained, the
        # pinned templates), also after a restart of the operator in the middle of this one.
        if not await self._write(job, previous, decision.status):
            return None
        if decision.expired:
            await self._delete_expired(job)
            return None
        await self._execute(job, decision, observed)
        self._metrics.passes.labels(result).inc()
        if self._refused.get(key, {}).keys() != observed.refused.keys():  # messages may differ each time
            return 0.0  # reconcile at once: the status has to show the refusal, or that it is over
        return decision.requeue_after

    async def _delete_expired(self, job: CachedJob) -> None:
        """Delete a job by its ttl, unless it was changed since: a change may reopen it, and reconciles it again."""
        newest = self._caches.job(job.key)
        if newest is not None and newest.uid == job.uid and newest.generation == job.generation:
            logger.info("deleting %s/%s: its ttlSecondsAfterFinished is over", *job.key)
            await self._kube.delete(FINETUNE_JOBS, *job.key, job.uid, version=str(newest.version))

    async def _write(self, job: CachedJob, previous: FinetuneJobStatus, status: FinetuneJobStatus) -> bool:
        """Write a status that has changed; returns whether the job still exists."""
        exists = await self._status.write(job, previous, status)
        self._restarts.record(job.key, previous, status)
        if not exists:
            self._caches.forget_job(job.key)
        return exists

    def _written(self, body: Manifest) -> None:
        """Note the job as this operator has written it."""
        self._caches.put_job(body)
        metadata = body["metadata"]
        self._last_change[metadata["namespace"], metadata["name"]] = int(metadata["resourceVersion"]), 0.0

    def _changed_elsewhere_at(self, job: CachedJob) -> float:
        """When the job was first seen as somebody else wrote it; 0 if this operator wrote it last."""
        version, changed_at = self._last_change.get(job.key, (-1, 0.0))
        if job.version != version:
            changed_at = self._clock()
            self._last_change[job.key] = job.version, changed_at
        return changed_at

    async def _missing_claims(self, job: CachedJob) -> Sequence[str] | None:
        """The claims that a job names and that do not exist; a job that has ended needs none."""
        exist = job.phase in ("Complete", "Failed") or any(pod.node for pod in self._caches.pods(job.key))
        return await self._claims.missing(job, lambda: _named_claims(job), exist=exist)

    def _observe(self, job: CachedJob, previous: FinetuneJobStatus, missing_claims: Sequence[str] | None) -> Observed:
        key = job.key
        pods = self._caches.pods(key)
        names = {*(pod.node for pod in pods), *(each.node for each in previous.unfit_nodes)}
        head = next((pod for pod in pods if pod.component == "head" and pod.runs), None)
        return Observed(
            provider_ids=self._caches.provider_ids(),
            storage_classes=self._caches.storage_classes(),
            children=self._caches.children(key),
            services=self._caches.services(job),
            pods=pods,
            nodes={name: node for name in names if (node := self._caches.node(name)) is not None},
            all_nodes=self._caches.all_nodes(),
            poll=self._poller.set_target(key, head.ip if head is not None else ""),
            refused=dict(self._refused.get(key, {})),
            missing_claims=missing_claims,
            created=job.created,
            changed_elsewhere_at=self._changed_elsewhere_at(job),
        )

    def _desired_children(self, job: CachedJob, previous: FinetuneJobStatus, observed: Observed) -> DesiredChildren:
        """The desired children, from the cache while neither the spec nor the pin has changed."""
        desired = self._desired.get(job, previous.pinned)
        if desired is None:
            unchanged = runs_as_reconciled(previous, job.generation)
            parsed, with_unknown = parse_known(FinetuneJob, parse_job, job.body, unchanged=unchanged)
            desired = render(parsed, job.uid, previous.pinned, observed.provider_ids, self._settings)
            if with_unknown is not None and desired.pinned != previous.pinned:
                raise with_unknown  # its pods depend on fields that this version does not know: leave them alone
            self._desired.put(job, desired)
        return desired

    async def _execute(self, job: CachedJob, decision: Decision, observed: Observed) -> None:
        key = job.key
        actions = [
            delete_gracefully(self._kube, decision.delete_gracefully),  # first, because the node has only seconds left
            force_delete(self._kube, decision.force_delete),
            self._delete(decision.delete),
            self._send_command(key, decision.command),
        ]
        applies = [self._apply(job, manifest, observed) for manifest in decision.apply]
        # None waits for another, and all are done before an error is raised: an apply may fail for hours.
        results = await asyncio.gather(*actions, *applies, return_exceptions=True)
        applied = zip(decision.apply, results[len(actions) :], strict=True)
        refused = {manifest["kind"]: result for manifest, result in applied if isinstance(result, str) and result}
        if refused:
            self._refused[key] = refused
        else:
            self._refused.pop(key, None)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        for service in decision.delete_services:  # one of a former name, once its successor is applied
            await self._kube.delete(MODEL_SERVICES, service.namespace, service.name, service.uid)

    async def _delete(self, children: Sequence[Child]) -> None:
        for child in children:
            await self._kube.delete(CHILDREN[child.kind], child.namespace, child.name, child.uid)

    async def _send_command(self, key: JobKey, command: str) -> None:
        if command:
            await self._poller.send_command(key, command)

    async def _apply(self, job: CachedJob, manifest: Manifest, observed: Observed) -> str:
        """Apply a child; returns why it was rejected, empty if it was not."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        child = observed.services.get(name) if kind == MODEL_SERVICES.kind else observed.children.get(kind)
        if child is None and kind == MODEL_SERVICES.kind:  # users choose its name, so it may be taken
            found = await self._kube.find(MODEL_SERVICES, job.namespace, name)
            if found is not None and controller_uid(found) != job.uid:
                return not_of_this_job(name)
        if isinstance(child, Child) and not child.deleting and is_queued(manifest):
            return await self._scale(child, manifest)
        live = child.digest if child is not None else None
        return await self._applier.apply(job.key, manifest, live, again=kind in observed.refused)

    async def _scale(self, cluster: Child, manifest: Manifest) -> str:
        """Change the number of workers of a RayCluster in a queue; returns why that was rejected."""
        operations = scale_operations(manifest, cluster.groups)
        try:
            if operations:
                await self._kube.json_patch(CHILDREN[cluster.kind], cluster.namespace, cluster.name, operations)
        except RefusedError as error:
            return str(error).partition("\n")[0]
        return ""

    def _forget(self, key: JobKey) -> None:
        """Forget a deleted job."""
        self._poller.set_target(key, "")
        self._restarts.forget(key)
        self._desired.forget(key)
        self._refused.pop(key, None)
        self._last_change.pop(key, None)
        self._applier.forget(key)
        self._claims.forget(key)


def _named_claims(job: CachedJob) -> list[str]:
    """The claim of ``spec.storage.existingClaim``; empty without one."""
    storage = (job.body["spec"] or {}).get("storage") or {}
    return [storage["existingClaim"]] if storage.get("existingClaim") else []
