"""Faults of objects that a job consists of: its RayCluster, spec, status, checkpoints and volume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from spotune_testcluster import volumes
from spotune_testcluster.volumes import VolumeState
from tests.cluster.chaos.errors import NothingToHitError
from tests.cluster.chaos.schedule import FaultKind, PlannedFault
from tests.cluster.chaos.target import Inject, Injection, Target

MOST_WORKERS = 3
LOSS_OF_A_STRANGER = 123456.0
"""No step has this loss, so a status with it is one that a stranger has written."""


def _ray_cluster_deleted(target: Target, _fault: PlannedFault) -> Injection:
    name = f"spotune-{target.job.name}"
    if not target.job.kubectl("get", "raycluster", name, "--ignore-not-found"):
        raise NothingToHitError("there is no RayCluster")
    target.job.kubectl("delete", "raycluster", name, "--wait=false")
    return Injection(name)


def _applied_again(target: Target, _fault: PlannedFault) -> Injection:
    target.job.apply_as("gitops")
    return Injection("the manifest of the beginning")


def _suspended(target: Target, _fault: PlannedFault) -> Injection:
    target.job.patch({"suspend": True})
    return Injection("suspend", lambda: target.job.patch({"suspend": False}))


def _resized(target: Target, fault: PlannedFault) -> Injection:
    now = int(target.job.kubectl.get("ftj", target.job.name)["spec"]["workers"]["count"])
    others = [count for count in range(1, MOST_WORKERS + 1) if count != now]
    count = others[int(fault.target * len(others))]
    target.job.patch({"workers": {"count": count}})
    return Injection(f"from {now} to {count}")


def _status_patched(target: Target, _fault: PlannedFault) -> Injection:
    status = {"phase": "Loading", "step": 1, "loss": LOSS_OF_A_STRANGER}
    patch = f"--patch={json.dumps({'status': status})}"
    target.job.kubectl("patch", "ftj", target.job.name, "--subresource=status", "--type=merge", patch)
    return Injection("phase, step and loss")


def _checkpoint_torn(target: Target, fault: PlannedFault) -> Injection:
    return Injection(target.volume.tear_newest_checkpoint(shorten=fault.target < 0.5))


def _volume_full(target: Target, _fault: PlannedFault) -> Injection:
    target.volume.fill()
    return Injection(target.volume.volume, target.volume.empty)


def _volume_frozen(target: Target, _fault: PlannedFault) -> Injection:
    target.volume.freeze()
    return Injection(target.volume.volume, target.volume.thaw)


def _volume_slow(target: Target, _fault: PlannedFault) -> Injection:
    volume = target.volume.volume
    volumes.set_state(target.machine, volume, VolumeState.SLOW)
    return Injection(volume, lambda: volumes.set_state(target.machine, volume, VolumeState.NORMAL))


FAULTS: Mapping[FaultKind, Inject] = MappingProxyType(
    {
        FaultKind.RAY_CLUSTER_DELETED: _ray_cluster_deleted,
        FaultKind.APPLIED_AGAIN: _applied_again,
        FaultKind.SUSPENDED: _suspended,
        FaultKind.RESIZED: _resized,
        FaultKind.STATUS_PATCHED: _status_patched,
        FaultKind.CHECKPOINT_TORN: _checkpoint_torn,
        FaultKind.VOLUME_FULL: _volume_full,
        FaultKind.VOLUME_FROZEN: _volume_frozen,
        FaultKind.VOLUME_SLOW: _volume_slow,
    }
)
