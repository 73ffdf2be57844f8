"""The service that answers while jobs train: on spot nodes as their workers, with its gateway on a node of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotune_testcluster.kubectl import KubectlError
from spotune_testcluster.providers import Provider
from spotune_testcluster.settings import NodeSettings
from tests import ROOT
from tests.cluster.chaos.serving.streams import StreamClients
from tests.cluster.finetune_jobs import INPUTS, READER, Workplace, copy_to_pod
from tests.cluster.model_services import RunningService, model_on_claim, running_service, service_manifest
from tests.cluster.redis import start_redis
from tests.cluster.serving_faults.trained_model import trained_once
from tests.cluster.status_history import ObservedJob, StatusHistory

REPLICAS = 2
_NAME = "counting"
_MODEL = "counting-model"
_SPARED = NodeSettings(number=4, provider=Provider.AKS, zone="westeurope-1")
"""A second on-demand node. A lost gateway ends its connections, so no fault hits it."""
_TAINT = "spotune.dev/spared"
_SECONDS_UNTIL_READY = 600.0


@dataclass(frozen=True)
class ServiceUnderChaos:
    """A service of the counting model, its clients, and its undisturbed answers.

    Attributes:
        running: The service.
        manifest: As it was applied.
        history: Its statuses, from the beginning on.
        clients: Starts clients.
        undisturbed: The text of each prompt without a fault.
    """

    running: RunningService
    manifest: dict[str, Any]
    history: StatusHistory
    clients: StreamClients
    undisturbed: list[str] = field(repr=False)

    def pods(self, component: str) -> list[dict[str, Any]]:
        """Its pods of a component that have a node, by name."""
        found = [pod for pod in self.running.pods(component) if pod["spec"].get("nodeName")]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def apply_as(self, manager: str) -> None:
        """Apply its manifest server-side with another field manager."""
        flags = ("--server-side", "--force-conflicts", f"--field-manager={manager}")
        self.running.kubectl("apply", *flags, "--filename=-", stdin=json.dumps(self.manifest))

    def save_logs(self, folder: Path) -> None:
        """Write the logs of its pods to `POD.log`, and of the containers before a restart to `POD.previous.log`."""
        for pod in self.running.kubectl.get("pods", f"--selector=spotune.dev/service={self.running.name}"):
            name = str(pod["metadata"]["name"])
            for file, flag in ((f"{name}.log", "--previous=false"), (f"{name}.previous.log", "--previous")):
                with suppress(KubectlError):  # no container runs, or none was restarted
                    log = self.running.kubectl("logs", name, "--timestamps", "--all-containers", flag)
                    (folder / file).write_text(log)

    def wait_until_recovered(self) -> float:
        """Wait until it is Ready with all replicas; returns the seconds that it took."""
        begin = time.time()
        if not _is_whole(self.history.last):
            self.history.wait_for("Ready with all replicas", _SECONDS_UNTIL_READY, _is_whole, begin)
        return time.time() - begin

    def statuses(self, since: float) -> list[ObservedJob]:
        """The statuses since a time, with the one before."""
        seen = self.history.seen
        before = [each for each in seen if each.time < since][-1:]
        return [*before, *(each for each in seen if each.time >= since)]


def _is_whole(seen: ObservedJob) -> bool:
    return seen.holds("Ready") and seen.status.get("readyReplicas") == REPLICAS


@contextmanager
def service_under_chaos(place: Workplace) -> Iterator[ServiceUnderChaos]:
    """The service, Ready; deleted at the end of the block. The operator must serve."""
    machine = place.cluster.machine_for("chaos")
    machine.add_node(_SPARED)
    machine.kubectl("taint", "node", _SPARED.name, f"{_TAINT}=true:NoSchedule", "--overwrite")
    export = trained_once(ROOT / "build/serving-faults-model")
    copy_to_pod(place.kubectl, READER, export, f"{INPUTS}/{_MODEL}")
    redis = start_redis(machine, place.kubectl, _SPARED.name)
    manifest = _manifest(place, redis)
    with StatusHistory(place.kubectl, _NAME, "modelservices") as history, running_service(place, manifest) as service:
        service.wait_until_ready(REPLICAS)
        url = str(service.status()["url"])
        clients = StreamClients(place.kubectl, place.cluster.image, _SPARED.name, url, _NAME)
        yield ServiceUnderChaos(service, manifest, history, clients, clients.undisturbed())


def _manifest(place: Workplace, redis: str) -> dict[str, Any]:
    manifest = service_manifest(place, _NAME, model=model_on_claim(_MODEL))
    spec = manifest["spec"]
    spec["replicas"] = {"min": REPLICAS, "max": REPLICAS}
    on_spared = {
        "nodeSelector": {"kubernetes.io/hostname": _SPARED.name},
        "tolerations": [{"key": _TAINT, "operator": "Exists"}],
    }
    spec["gateway"] |= {"podTemplate": {"spec": on_spared}}
    spec["cluster"] |= {"redisAddress": redis}
    return manifest
