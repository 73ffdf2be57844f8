"""One level-triggered reconcile of one ModelService: observe, decide, execute the decision, write the status.

A reconcile may run at any time, run twice, and stop at any point.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from spotune.errors import JobError
from spotune.job_file.load import parse_service
from spotune.service import ModelService, ModelServiceStatus
from spotune_operator.children.serving.groups import GATEWAY, REPLICAS
from spotune_operator.errors import KubernetesError, NotFoundError, RefusedError
from spotune_operator.kube.applier import ChildApplier
from spotune_operator.kube.client import MODEL_SERVICES, RAY_CLUSTERS, RAY_SERVICES, SERVICE_CHILDREN, Kube
from spotune_operator.kube.phase_change import OnPhaseChange, ignore
from spotune_operator.kube.pod_deletion import delete_gracefully, force_delete, replace_unused
from spotune_operator.kube.status_writer import StatusWriter
from spotune_operator.observe.caches import CachedJob, Caches
from spotune_operator.observe.existing_claims import ExistingClaims
from spotune_operator.observe.newer_definition import parse_known, parse_status, runs_as_reconciled
from spotune_operator.reconcile.events import Involved, condition_events
from spotune_operator.runtime.metrics import Metrics
from spotune_operator.serving.caches import CachedService, ServiceCaches
from spotune_operator.serving.decide import ServiceDecision, decide_service, decide_stalled_service
from spotune_operator.serving.gateway_poller import GatewayPoller, traffic_window
from spotune_operator.serving.scaling import Resize
from spotune_operator.serving.state import ObservedService, ServiceKey, TrainedModel
from spotune_operator.settings import Settings

logger = logging.getLogger(__name__)


class ServiceReconciler:
    """Reconciles services.

    Args:
        kube: The API server.
        caches: Services, their children and pods.
        jobs: FinetuneJobs and nodes.
        poller: Traffic of the gateways.
        settings: The operator's.
        metrics: Counts reconciles by result.
        clock: Returns Unix time.
        phase_changed: Called after a status with another phase was written.
    """

    def __init__(
        self,
        kube: Kube,
        caches: ServiceCaches,
        jobs: Caches,
        poller: GatewayPoller,
        settings: Settings,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
        phase_changed: OnPhaseChange = ignore,
    ) -> None:
        self._kube = kube
        self._caches = caches
        self._jobs = jobs
        self._poller = poller
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._applier = ChildApplier(kube, caches.version_of)
        self._claims = ExistingClaims(kube, settings.rejected_retry_seconds, clock)
        self._status: StatusWriter[CachedService, ModelServiceStatus] = StatusWriter(
            kube, MODEL_SERVICES, self._events, caches.put_written, phase_changed
        )
        self._refused: dict[ServiceKey, dict[str, str]] = {}

    async def reconcile(self, key: ServiceKey) -> float | None:
        """Reconcile a service.

        Returns:
            Seconds until the next reconcile without an event; None: none is needed.

        Raises:
            KubernetesError: The API server failed: reconcile again.
        """
        service = self._caches.service(key)
        if service is None or service.deleting:
            self._applier.forget(key)
            self._claims.forget(key)
            self._refused.pop(key, None)
            self._poller.forget(key)
            return None
        previous = parse_status(ModelServiceStatus, service.status)
        exist = any(pod.node and pod.component in (GATEWAY, REPLICAS) for pod in self._caches.pods(key))
        missing_claims = await self._claims.missing(service, lambda: service.claims, exist=exist)
        observed = self._observe(service, missing_claims)
        pods = [(pod.uid, pod.ready_since) for pod in observed.ready_pods(REPLICAS)]
        traffic = self._poller.traffic(key, observed.gateways, traffic_window(previous), pods)
        observed = replace(observed, traffic=traffic)
        unchanged = runs_as_reconciled(previous, service.generation)
        result = "ok"
        try:
            parsed, with_unknown = parse_known(ModelService, parse_service, service.body, unchanged=unchanged)
            decision = decide_service(
                parsed,
                uid=service.uid,
                generation=service.generation,
                previous=previous,
                observed=observed,
                now=self._clock(),
                settings=self._settings,
            )
            if with_unknown is not None and decision.status.pinned != previous.pinned:
                raise with_unknown  # its pods depend on fields that this version does not know: leave them alone
        except JobError as error:
            result = "stalled"
            decision = decide_stalled_service(
                error,
                generation=service.generation,
                previous=previous,
                observed=observed,
                now=self._clock(),
                settings=self._settings,
            )
        if not await self._status.write(service, previous, decision.status):
            return None
        await self._execute(key, decision, observed)
        self._metrics.passes.labels(result).inc()
        if self._refused.get(key, {}).keys() != observed.refused.keys():  # messages may differ each time
            return 0.0  # reconcile at once: the status has to show the refusal, or that it is over
        return decision.requeue_after

    def _observe(self, service: CachedService, missing_claims: Sequence[str] | None) -> ObservedService:
        jobs = {name: self._jobs.job((service.namespace, name)) for name in service.jobs}
        pods = self._caches.pods(service.key)
        return ObservedService(
            provider_ids=self._jobs.provider_ids(),
            jobs={name: _trained_model(job) for name, job in jobs.items() if job is not None},
            children=self._caches.children(service),
            clusters=self._caches.clusters(service.key),
            pods=pods,
            nodes={pod.node: node for pod in pods if (node := self._jobs.node(pod.node)) is not None},
            refused=dict(self._refused.get(service.key, {})),
            missing_claims=missing_claims,
        )

    async def _execute(self, key: ServiceKey, decision: ServiceDecision, observed: ObservedService) -> None:
        await delete_gracefully(self._kube, decision.delete_gracefully)  # first, because the node has only seconds left
        await force_delete(self._kube, decision.force_delete)
        await replace_unused(self._kube, decision.replace)
        refused, failure = await self._apply_all(key, decision.apply, observed)
        for child in decision.delete:
            if failure is None or child.kind == RAY_SERVICES.kind:  # others are deleted after their successors exist
                await self._kube.delete(SERVICE_CHILDREN[child.kind], child.namespace, child.name, child.uid)
        for cluster in decision.give_up:
            logger.warning("deleting RayCluster %s: KubeRay replaces it, and no cluster serves yet", cluster.name)
            await self._kube.delete(RAY_CLUSTERS, cluster.namespace, cluster.name, cluster.uid)
        for resize in decision.resize:
            if error := await self._resize(resize):
                refused[RAY_CLUSTERS.kind] = error
        if failure is not None:
            raise failure
        if refused:
            self._refused[key] = refused
        else:
            self._refused.pop(key, None)

    async def _apply_all(
        self, key: ServiceKey, manifests: Sequence[dict[str, Any]], observed: ObservedService
    ) -> tuple[dict[str, str], KubernetesError | None]:
        """Apply children in order, policies before pods, until the API server fails: a webhook may do so for hours.

        Returns:
            Why it rejected children, by kind; and its failure, to be raised when all that relies on no apply is done.
        """
        refused: dict[str, str] = {}
        try:
            for manifest in manifests:
                if error := await self._apply(key, manifest, observed):
                    refused[manifest["kind"]] = error
        except KubernetesError as failure:
            return refused, failure
        return refused, None

    async def _apply(self, key: ServiceKey, manifest: dict[str, Any], observed: ObservedService) -> str:
        """Apply a child; returns why the API server rejected it, empty if it did not."""
        kind = manifest["kind"]
        child = observed.children.get((kind, manifest["metadata"]["name"]))
        live = child.digest if child is not None else None
        return await self._applier.apply(key, manifest, live, again=kind in observed.refused)

    async def _resize(self, resize: Resize) -> str:
        """Change the numbers of pods of a RayCluster; returns why the API server rejected it, empty if it did not."""
        cluster = resize.cluster
        try:
            await self._kube.json_patch(RAY_CLUSTERS, cluster.namespace, cluster.name, resize.operations)
        except NotFoundError:  # it was deleted since: its event causes another reconcile
            return ""
        except RefusedError as error:
            logger.warning("resizing RayCluster %s failed: %s", cluster.name, error)
            return str(error)
        return ""

    def _events(
        self, service: CachedService, previous: ModelServiceStatus, status: ModelServiceStatus
    ) -> Iterator[dict[str, Any]]:
        """The Events for the difference of two statuses."""
        involved = Involved(MODEL_SERVICES.kind, service.namespace, service.name, service.uid)
        return condition_events(involved, previous.conditions, status.conditions, self._clock())


def _trained_model(job: CachedJob) -> TrainedModel:
    status = job.status
    exported = (status.get("trained") or {}).get("step")
    loss = {"loss": status["evalLoss"]} if status.get("evalLoss") is not None else {}
    return TrainedModel(
        output=str(status.get("output") or ""),
        step=int(exported or status.get("step") or 0),
        phase=job.phase,
        has_failed=job.phase == "Failed",
        scores=loss | (status.get("evalScores") or {}),
        task=str((job.body["spec"].get("model") or {}).get("task") or ""),
    )
