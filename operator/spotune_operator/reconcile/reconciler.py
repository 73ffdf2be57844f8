"""One level-triggered pass over one job: observe, decide, say, act. Safe at any time, twice, and cut off anywhere.

Nothing that matters is kept here: what was applied is remembered only so as not to apply it again while neither the
wish nor the object has changed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from spotune.errors import JobError
from spotune.job import FinetuneJob, FinetuneJobStatus
from spotune.job_file.load import parse_job
from spotune.job_file.yaml_file import Document
from spotune_operator.errors import NotFoundError, RefusedError
from spotune_operator.kube.client import CHILDREN, EVENTS, JOBS, PODS, Kube, Manifest
from spotune_operator.kube.conditions import is_true
from spotune_operator.kube.merge_patch import merge_patch
from spotune_operator.observe.caches import Caches, KnownJob
from spotune_operator.observe.state import Child, JobKey, Observed, child_view, digest
from spotune_operator.observe.supervisor_poller import Poller
from spotune_operator.reconcile.decide import Decision, decide, stalled
from spotune_operator.reconcile.desired_children import Rendered, render
from spotune_operator.reconcile.events import job_events
from spotune_operator.runtime.metrics import Metrics
from spotune_operator.settings import Settings

logger = logging.getLogger(__name__)

_RENDERED_AT_MOST: Final = 200
"""So many jobs without a head are kept as worked out; those with one always are."""


@dataclass(frozen=True, slots=True)
class _Applied:
    """What was applied last of a child: the wish, and digest and version of the object that came of it."""

    wish: str
    digest: str
    version: int


class Reconciler:
    """Brings jobs to what their specs say.

    Args:
        kube: The API server.
        caches: What the cluster holds.
        poller: What the supervisors say.
        settings: The operator's.
        metrics: Where passes are counted.
        clock: Unix time.
    """

    def __init__(
        self,
        kube: Kube,
        caches: Caches,
        poller: Poller,
        settings: Settings,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._kube = kube
        self._caches = caches
        self._poller = poller
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._applied: dict[JobKey, dict[str, _Applied]] = {}
        self._refused: dict[JobKey, dict[str, str]] = {}
        self._rendered: dict[JobKey, tuple[str, int, Rendered]] = {}
        self._interrupted: dict[JobKey, float] = {}

    async def reconcile(self, key: JobKey) -> float | None:
        """One pass.

        Returns:
            Seconds after which the job wants another look even if nothing happens; None: not before.

        Raises:
            KubernetesError: The API server does not answer, or not as it should: the pass is to be made again.
        """
        known = self._caches.job(key)
        if known is None or known.deleting:
            self._forget(key)
            return None
        previous = _status_of(known)
        try:
            seen = self._observe(key)
            decision = decide(
                self._render(known, previous, seen),
                generation=known.generation,
                previous=previous,
                seen=seen,
                now=self._clock(),
                settings=self._settings,
            )
        except JobError as error:
            self._metrics.passes.labels("stalled").inc()
            await self._say(known, previous, stalled(previous, error, known.generation, self._clock()))
            return None
        # First the word, then the deed: what the status remembers (that the preflight has passed, that the model is
        # trained, the pin) is what a pass goes by that knows no more, because the operator has just been started.
        if not await self._say(known, previous, decision.status):
            return None
        await self._act(key, decision, seen)
        if self._refused.get(key, {}) != seen.refused:
            return 0.0  # say so at once
        self._metrics.passes.labels("ok").inc()
        return decision.again_after

    def _render(self, known: KnownJob, previous: FinetuneJobStatus, seen: Observed) -> Rendered:
        """What the job is made into; the same as at the last pass while nothing that it is made from has changed."""
        key = known.key
        before = self._rendered.get(key)
        if before is not None and before[:2] == (known.uid, known.generation) and before[2].pinned == previous.pinned:
            return before[2]
        rendered = render(_job_of(known), known.uid, previous.pinned, seen.provider_ids, self._settings)
        self._rendered.pop(key, None)
        self._rendered[key] = known.uid, known.generation, rendered
        if len(self._rendered) > _RENDERED_AT_MOST:
            self._drop_a_rendered_one()
        return rendered

    def _drop_a_rendered_one(self) -> None:
        """Forget the oldest of a job without a head: it is seldom looked at, and can be worked out again."""
        idle = next((key for key in self._rendered if not self._poller.asks(key)), None)
        if idle is not None:
            del self._rendered[idle]

    def _observe(self, key: JobKey) -> Observed:
        pods = self._caches.pods(key)
        head = next((pod for pod in pods if pod.component == "head" and pod.runs), None)
        return Observed(
            provider_ids=self._caches.provider_ids(),
            storage_classes=self._caches.storage_classes(),
            children=self._caches.children(key),
            pods=pods,
            nodes={pod.node: node for pod in pods if (node := self._caches.node(pod.node)) is not None},
            reading=self._poller.watch(key, head.ip if head is not None else ""),
            refused=dict(self._refused.get(key, {})),
        )

    async def _act(self, key: JobKey, decision: Decision, seen: Observed) -> None:
        for pod in decision.give_notice:  # first, for it has seconds
            logger.warning("pod %s has to leave: the cloud takes its node %s away", pod.name, pod.node)
            await self._kube.delete(PODS, pod.namespace, pod.name, pod.uid)
        answers = await asyncio.gather(*(self._apply(key, manifest, seen) for manifest in decision.apply))
        refused = {manifest["kind"]: words for manifest, words in zip(decision.apply, answers, strict=True) if words}
        for child in decision.delete:
            await self._kube.delete(CHILDREN[child.kind], child.namespace, child.name, child.uid)
        for pod in decision.force_delete:
            logger.warning("pod %s is taken away: its node %s will not say that it is gone", pod.name, pod.node)
            await self._kube.delete(PODS, pod.namespace, pod.name, pod.uid, grace_seconds=0)
        if decision.ask:
            await self._poller.ask(key, decision.ask)
        if refused:
            self._refused[key] = refused
        else:
            self._refused.pop(key, None)

    async def _apply(self, key: JobKey, manifest: Manifest, seen: Observed) -> str:
        """Apply a child, unless it is as it was when it was last applied, and is wished no other way.

        Returns:
            Why the API server does not take it; empty if it does.
        """
        kind, wish = manifest["kind"], digest(manifest)
        if kind not in seen.refused and self._is_as_wished(key, kind, wish, seen.children.get(kind)):
            return ""
        try:
            found = await self._kube.apply(manifest)
        except (RefusedError, NotFoundError) as error:  # a kind that is not installed is not found
            words = str(error).partition("\n")[0]  # what follows is a Go programmer's view of the difference
            logger.warning("%s: %s", kind, words)
            return words
        version = int(found["metadata"]["resourceVersion"])
        self._applied.setdefault(key, {})[kind] = _Applied(wish, child_view(found, kind).digest, version)
        return ""

    def _is_as_wished(self, key: JobKey, kind: str, wish: str, live: Child | None) -> bool:
        """Whether a child is still what came of the last apply, as far as the cache can tell.

        A cache that has not got as far as that apply knows nothing about it yet: neither a missing child nor
        another content means that somebody has taken it away or changed it.
        """
        applied = self._applied.get(key, {}).get(kind)
        if applied is None or applied.wish != wish:
            return False
        is_old = self._caches.version_of(key, kind) < applied.version
        return is_old or (live is not None and live.digest == applied.digest)

    async def _say(self, known: KnownJob, previous: FinetuneJobStatus, status: FinetuneJobStatus) -> bool:
        """Write the status if it is another one, after the Events about what is new in it; whether the job is there."""
        after = _content(status)
        missing = {name: after[name] for name in after.keys() - known.status.keys()}
        changes = merge_patch(_content(previous), after) | missing
        if not changes:
            return True
        for event in job_events(known, previous, status, self._clock()):
            await self._kube.create(EVENTS, event)
        self._measure(known.key, previous, status)
        try:
            patch = {"metadata": {"uid": known.uid}, "status": changes}
            written = await self._kube.patch(JOBS, *known.key, patch, "status")
        except NotFoundError:
            self._caches.forget_job(known.key)
            return False
        self._caches.put_job(written)
        return True

    def _measure(self, key: JobKey, previous: FinetuneJobStatus, status: FinetuneJobStatus) -> None:
        """Count restarts, and how long it takes from the first sign of one to the next new step."""
        before = previous.restarts.model_dump(mode="json")
        for cause, count in status.restarts.model_dump(mode="json").items():
            if cause != "total" and count > before[cause]:
                self._metrics.restarts.labels(cause).inc(count - before[cause])
        if is_true(previous.conditions, "Training") and not is_true(status.conditions, "Training"):
            self._interrupted.setdefault(key, self._clock())
        elif status.highest_step > previous.highest_step and key in self._interrupted:
            self._metrics.recovery_seconds.observe(self._clock() - self._interrupted.pop(key))

    def _forget(self, key: JobKey) -> None:
        self._poller.watch(key, "")
        self._refused.pop(key, None)
        self._interrupted.pop(key, None)
        self._rendered.pop(key, None)
        self._applied.pop(key, None)


def _job_of(known: KnownJob) -> FinetuneJob:
    """The job of an object, if it can be run.

    Raises:
        JobError: It is not valid; says what.
    """
    return parse_job(Document(content=known.body))


def _status_of(known: KnownJob) -> FinetuneJobStatus:
    """The status so far; an empty one where there is none that this version can read."""
    try:
        return FinetuneJobStatus.model_validate(known.status)
    except ValidationError as error:
        logger.warning("the status is written anew, for it cannot be read: %s", error)
        return FinetuneJobStatus()


def _content(status: FinetuneJobStatus) -> dict[str, Any]:
    content: dict[str, Any] = status.model_dump(mode="json", exclude_none=True)
    return content
