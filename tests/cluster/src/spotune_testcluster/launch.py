"""Into new namespaces: `python -m spotune_testcluster.launch cluster|node FOLDER` prints the PID of their init.

The launcher joins a control group, leaves every namespace it was started in, and forks: its child is PID 1 of the new
ones and goes on for ever, the launcher ends. A node's launcher is started by its cluster's init, so that the node's
namespaces lie inside the cluster's and end with them.
"""

import os
import sys
from pathlib import Path

from spotune_testcluster import cgroups, control_plane, linux, node
from spotune_testcluster.home import ClusterFiles, NodeFiles


def main() -> None:
    """Start the init of the cluster or node whose folder is given."""
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
    """Nothing of the launcher's input and output stays open."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(nothing, 0)
    os.dup2(written, 1)
    os.dup2(written, 2)


if __name__ == "__main__":
    main()
