"""Where everything of the test clusters lives: what is built once, and one folder per cluster."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from spotune_testcluster.errors import ClusterError

REPOSITORY = Path(__file__).resolve().parents[4]
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


@dataclass(frozen=True)
class Home:
    """The folder of all clusters of this user; `SPOTUNE_TESTCLUSTER_HOME` moves it."""

    root: Path

    @classmethod
    def default(cls) -> "Home":
        """Below the user's cache, so that a second clone of the repository finds what the first has built."""
        given = os.environ.get("SPOTUNE_TESTCLUSTER_HOME")
        return cls(Path(given).resolve() if given else Path.home() / ".cache/spotune-testcluster")

    @property
    def clusters(self) -> Path:
        """One folder per cluster that is up, or was when its machine or tool died."""
        return self.root / "clusters"

    def cluster(self, name: str) -> "ClusterFiles":
        """The files of one cluster, which need not exist."""
        if not NAME.fullmatch(name):
            raise ClusterError(f"{name!r} is no name for a cluster: lower-case letters, digits and '-', 32 at most")
        return ClusterFiles(self.clusters / name)


@dataclass(frozen=True)
class MachineFiles:
    """The folder of a cluster or a node, seen at the same path from the host and from inside its namespaces."""

    root: Path

    @property
    def name(self) -> str:
        """The cluster's or node's name."""
        return self.root.name

    @property
    def settings(self) -> Path:
        """What it was started with, as JSON."""
        return self.root / "settings.json"

    @property
    def socket(self) -> Path:
        """Where its PID 1 is asked."""
        return self.root / "control.sock"


@dataclass(frozen=True)
class ClusterFiles(MachineFiles):
    """The folder of one cluster."""

    @property
    def group(self) -> str:
        """The control group with all of the cluster's processes in it, or in groups below."""
        return f"spotune-testcluster-{self.name}"

    @property
    def pki(self) -> Path:
        """Certificates and kubeconfigs."""
        return self.root / "pki"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's, for the host."""
        return self.root / "kubeconfig"

    @property
    def logs(self) -> Path:
        """One file per component of the control plane and the nodes."""
        return self.root / "logs"

    @property
    def audit_log(self) -> Path:
        """What the API server was asked, by whom (JSON lines of audit.k8s.io/v1 Events)."""
        return self.logs / "audit.log"

    @property
    def volumes(self) -> Path:
        """The shared mount point: every ReadWriteMany volume is a folder here, on every node."""
        return self.root / "volumes"

    @property
    def nodes(self) -> Path:
        """One folder per node."""
        return self.root / "nodes"

    def node(self, name: str) -> "NodeFiles":
        """The files of one node, which need not exist."""
        return NodeFiles(self.nodes / name)


@dataclass(frozen=True)
class NodeFiles(MachineFiles):
    """The folder of one node: its disks stay when it crashes."""

    @property
    def var_lib(self) -> Path:
        """What the node sees as /var/lib: containerd's and the kubelet's disks."""
        return self.root / "lib"

    @property
    def var_log(self) -> Path:
        """What the node sees as /var/log: the pods' logs."""
        return self.root / "log"
