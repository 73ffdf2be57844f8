"""The folder of a job on its volume, from outside of all pods: the volume is a mount of the test cluster.

So it can be read and broken while the API server, nodes and pods are down.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotune_testcluster.cluster import Cluster
from spotune_testcluster.errors import ClusterError
from spotune_trainer.job_directory.layout import JobDirectory
from tests.cluster.chaos.errors import NothingToHitError
from tests.cluster.finetune_jobs import MOUNTED_AT

_KEPT_FREE_BYTES = 64 << 10
"""The file system needs some blocks for itself; they are filled by ordinary writes."""
_NOT_COPIED = ("checkpoints", "logs/tensorboard")


@dataclass(frozen=True)
class JobVolume:
    """One job's folder.

    Attributes:
        machine: the cluster of the volume.
        volume: name of the PersistentVolume.
        directory: the job's folder, as its pods see it.
    """

    machine: Cluster
    volume: str
    directory: str

    @property
    def mount(self) -> Path:
        """Where the volume is mounted."""
        return self.machine.files.volumes / self.volume

    @property
    def job(self) -> JobDirectory:
        """The job's folder, within the namespaces of the cluster."""
        return JobDirectory(self.mount / Path(self.directory).relative_to(MOUNTED_AT))

    def progress(self) -> dict[str, Any]:
        """The driver's last status."""
        found: dict[str, Any] = json.loads(self._run("cat", str(self.job.status)))
        return found

    def tear_newest_checkpoint(self, *, shorten: bool) -> str:
        """Shorten a file of the newest checkpoint, or overwrite bytes in its middle; returns the checkpoint's name.

        Raises:
            NothingToHitError: there is no checkpoint.
        """
        pattern = f"{self.job.checkpoints}/step-*/manifest.json"
        committed = self._run("bash", "-c", f"ls {pattern} 2>/dev/null | sort | tail -1").strip()
        if not committed:
            raise NothingToHitError("there is no checkpoint yet")
        file = Path(committed).with_name("rank-00000.safetensors")
        size = int(self._run("stat", "--format=%s", str(file)))
        if shorten:
            self._run("truncate", f"--size={size // 2}", str(file))
        else:
            junk = f"dd if=/dev/urandom of={file} bs=1 count=64 seek={size // 2} conv=notrunc status=none"
            self._run("bash", "-c", junk)
        return file.parent.name

    def fill(self) -> None:
        """Take all free space of the volume."""
        script = (
            f"cd {self.mount} && free=$(df --output=avail --block-size=1 . | tail -1) && "
            f"fallocate --length $((free - {_KEPT_FREE_BYTES})) fill; "
            "dd if=/dev/zero of=fill-more bs=4k status=none; true"
        )
        self._run("bash", "-c", script)

    def empty(self) -> None:
        """Give the space back that `fill` took."""
        self._run("rm", "--force", str(self.mount / "fill"), str(self.mount / "fill-more"))

    def freeze(self) -> None:
        """Let all writes wait until `thaw`; what is read from memory is still read.

        Raises:
            NothingToHitError: it is frozen already.
        """
        if self._enter("fsfreeze", "--freeze", str(self.mount)).returncode != 0:
            raise NothingToHitError("the volume is frozen already")

    def thaw(self) -> None:
        """Let writes go on. Does nothing if they do."""
        self._enter("fsfreeze", "--unfreeze", str(self.mount))

    def speed_up(self, folder: str) -> None:
        """Let the steps that `tests.cluster.paced` makes at a pace no longer wait; `folder` is that of its code."""
        self._run("touch", str(self._full_speed(folder)))

    def slow_down(self, folder: str) -> None:
        """Undo `speed_up`."""
        self._run("rm", "--force", str(self._full_speed(folder)))

    def _full_speed(self, folder: str) -> Path:
        return self.mount / Path(folder).relative_to(MOUNTED_AT) / "at-full-speed"

    def copy_to(self, folder: Path) -> JobDirectory:
        """Copy the job's files without checkpoints into a new folder."""
        folder.mkdir(parents=True)
        leave_out = [f"--exclude=./{path}" for path in _NOT_COPIED]
        pack = ["tar", "--create", *leave_out, f"--directory={self.job.root}", "."]
        packed = subprocess.run([*self.machine.way_in(), *pack], capture_output=True, check=False)
        if packed.returncode > 1:  # 1: a file changed while it was read
            raise ClusterError(f"the files of the job could not be copied: {packed.stderr.decode().strip()}")
        unpack = ["tar", "--extract", "--no-same-owner", f"--directory={folder}"]
        subprocess.run(unpack, input=packed.stdout, check=True)
        return JobDirectory(folder)

    def _run(self, *command: str) -> str:
        done = self._enter(*command)
        if done.returncode != 0:
            raise NothingToHitError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def _enter(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self.machine.enter(*command, check=False)
