"""Paths of all files of the test clusters: what is built once, and one folder per cluster."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from spotune_testcluster.errors import ClusterError

REPOSITORY = Path(__file__).resolve().parents[4]
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


@dataclass(frozen=True)
class Home:
    """The folder of all clusters of this user; `SPOTUNE_TESTCLUSTER_HOME` changes it."""

    root: Path

    @classmethod
    def default(cls) -> "Home":
        """A folder in the user's cache, so that all clones of the repository share what one of them has built."""
        given = os.environ.get("SPOTUNE_TESTCLUSTER_HOME")
        return cls(Path(given).resolve() if given else Path.home() / ".cache/spotune-testcluster")

    @property
    def clusters(self) -> Path:
        """One folder per cluster that is up, or was up when the machine or the tool crashed."""
        return self.root / "clusters"

    def cluster(self, name: str) -> "ClusterFiles":
        """The files of one cluster; it need not exist."""
        if not NAME.fullmatch(name):
            raise ClusterError(f"{name!r} is no name for a cluster: use at most 32 lower-case letters, digits and '-'")
        return ClusterFiles(self.clusters / name)


@dataclass(frozen=True)
class MachineFiles:
    """The folder of a cluster or a node. It has the same path on the host and inside the namespaces."""

    root: Path

    @property
    def name(self) -> str:
        """The cluster's or node's name."""
        return self.root.name

    @property
    def settings(self) -> Path:
        """The settings that it was started with, as JSON."""
        return self.root / "settings.json"

    @property
    def socket(self) -> Path:
        """The Unix socket of its PID 1."""
        return self.root / "control.sock"


@dataclass(frozen=True)
class ClusterFiles(MachineFiles):
    """The folder of one cluster."""

    @property
    def group(self) -> str:
        """The control group that has all processes of the cluster, itself or in groups below it."""
        return f"spotune-testcluster-{self.name}"

    @property
    def pki(self) -> Path:
        """Certificates and kubeconfigs."""
        return self.root / "pki"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig, for use on the host."""
        return self.root / "kubeconfig"

    @property
    def logs(self) -> Path:
        """One file per component of the control plane and the nodes."""
        return self.root / "logs"

    @property
    def audit_log(self) -> Path:
        """All requests to the API server with their users (JSON lines of audit.k8s.io/v1 Events)."""
        return self.logs / "audit.log"

    @property
    def volumes(self) -> Path:
        """The shared mount point. Every ReadWriteMany volume is a folder in it, on every node."""
        return self.root / "volumes"

    @property
    def nodes(self) -> Path:
        """One folder per node."""
        return self.root / "nodes"

    def node(self, name: str) -> "NodeFiles":
        """The files of one node; it need not exist."""
        return NodeFiles(self.nodes / name)


@dataclass(frozen=True)
class NodeFiles(MachineFiles):
    """The folder of one node. A crash keeps its disks."""

    @property
    def var_lib(self) -> Path:
        """/var/lib of the node: the disks of containerd and the kubelet."""
        return self.root / "lib"

    @property
    def var_log(self) -> Path:
        """/var/log of the node: the logs of the pods."""
        return self.root / "log"
