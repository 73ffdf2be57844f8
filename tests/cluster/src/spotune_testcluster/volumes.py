"""Faults of ReadWriteMany volumes. Each volume is a file with a file system, on a loop device of the machine.

A fault of that device makes a volume read-only or slow for every node at once, as a failing storage account does.
"""

import fcntl
import os
import re
import subprocess
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from spotune_testcluster.errors import ClusterError, DidNotStartError
from spotune_testcluster.waiting import wait_for

if TYPE_CHECKING:
    from spotune_testcluster.cluster import Cluster

THROTTLES = [Path(f"/sys/fs/cgroup/blkio/blkio.throttle.{direction}_bps_device") for direction in ("read", "write")]
LOOP_CONTROL = Path("/dev/loop-control")
LOOP_CTL_REMOVE = 0x4C81  # linux/loop.h
LOOP_DEVICES_OF_THE_KERNEL = 8
SLOW_BYTES_PER_SECOND = 1 << 20
SECONDS_TO_BE_IDLE = 30.0


class VolumeState(StrEnum):
    """How a volume behaves."""

    NORMAL = "normal"
    READ_ONLY = "read-only"
    SLOW = "slow"


def set_state(cluster: "Cluster", volume: str, state: VolumeState) -> None:
    """Make a volume read-only (EROFS in every pod), slow (1 MiB/s each way), or normal again.

    Args:
        cluster: The cluster that the volume belongs to.
        volume: The PersistentVolume's name.
        state: The new state.

    Raises:
        ClusterError: The volume does not exist, has no size limit (and so no device), or was never idle.
    """
    device, point = _mounted(cluster, volume)
    number = (Path("/sys/block") / device / "dev").read_text().strip()
    _throttle(number, SLOW_BYTES_PER_SECOND if state is VolumeState.SLOW else 0)
    mode = "ro" if state is VolumeState.READ_ONLY else "rw"

    def remounted() -> bool:
        done = cluster.enter("mount", "-o", f"remount,{mode}", str(point), check=False)
        return done.returncode == 0

    try:
        wait_for("a moment without a file open for writing", SECONDS_TO_BE_IDLE, remounted, every=0.02)
    except DidNotStartError as error:
        raise ClusterError(f"volume {volume} was not changed, because a pod keeps a file open for writing") from error


def _mounted(cluster: "Cluster", volume: str) -> tuple[str, Path]:
    """The loop device of a volume, and its mount point."""
    point = cluster.files.volumes / volume
    for line in cluster.enter("cat", "/proc/self/mounts").stdout.splitlines():
        device, where, *_ = line.split()
        if where == str(point) and device.startswith("/dev/loop"):
            return device.removeprefix("/dev/"), point
    raise ClusterError(f"{volume} has no loop device: is it a bound volume of storage class `shared`?")


def forget(volumes: Path) -> None:
    """Release the loop devices and throttles of an ended cluster's volumes."""
    bound = {path.parts[3]: path.read_text().strip() for path in Path("/sys/block").glob("loop*/loop/backing_file")}
    for device, backing in bound.items():
        if backing.startswith(f"{volumes}/"):
            subprocess.run(["losetup", "--detach", f"/dev/{device}"], check=False, capture_output=True)
    for number in _throttled_loops():
        if not (Path("/sys/dev/block") / number / "loop").exists():
            _throttle(number, 0)
    _remove_spare_devices()


def _throttle(number: str, bytes_per_second: int) -> None:
    """Limit a block device (`major:minor`); 0 removes the limit. It applies to the root group: the kernel writes."""
    for throttle in THROTTLES:
        if throttle.exists():
            throttle.write_text(f"{number} {bytes_per_second}\n")
        elif bytes_per_second:
            raise ClusterError(f"cannot slow a volume here: {throttle} is missing (needs control groups v1)")


def _throttled_loops() -> Iterator[str]:
    for throttle in THROTTLES:
        if throttle.exists():
            yield from re.findall(r"^(7:\d+) ", throttle.read_text(), re.MULTILINE)


def _remove_spare_devices() -> None:
    """Remove unused loop devices above those that the kernel starts with."""
    if not LOOP_CONTROL.exists():
        return
    control = os.open(LOOP_CONTROL, os.O_RDWR)
    try:
        for device in Path("/sys/block").glob("loop*"):
            number = int(device.name.removeprefix("loop"))
            if number >= LOOP_DEVICES_OF_THE_KERNEL and not (device / "loop").exists():
                try:
                    fcntl.ioctl(control, LOOP_CTL_REMOVE, number)
                except OSError:  # another cluster took it meanwhile
                    continue
    finally:
        os.close(control)
