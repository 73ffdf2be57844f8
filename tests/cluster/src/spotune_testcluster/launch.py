"""Starts an init in new namespaces: `python -m spotune_testcluster.launch cluster|node FOLDER` prints its PID.

The launcher joins a control group, enters new namespaces, forks and exits. Its child is PID 1 of the new namespaces and
runs forever. The cluster's init starts the launcher of each node. So a node's namespaces are inside those of the
cluster, and end with them.
"""

import os
import sys
from pathlib import Path

from spotune_testcluster import cgroups, control_plane, linux, node
from spotune_testcluster.home import ClusterFiles, NodeFiles


def main() -> None:
    """Start the init of the cluster or node with the given folder."""
    kind, folder = sys.argv[1], Path(sys.argv[2])
    cgroups.join(ClusterFiles(folder).group if kind == "cluster" else folder.name)
    os.setsid()
    linux.unshare(linux.ALL_NAMESPACES)
    pid = os.fork()
    if pid:
        sys.stdout.write(f"{pid}\n")
        return
    _detach(folder / "init.log")
    if kind == "cluster":
        control_plane.run(ClusterFiles(folder))
    else:
        node.run(NodeFiles(folder))


def _detach(log: Path) -> None:
    """Close the launcher's standard input and output; write to `log` instead."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(nothing, 0)
    os.dup2(written, 1)
    os.dup2(written, 2)


if __name__ == "__main__":
    main()
