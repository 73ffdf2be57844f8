"""The name of this node, for people and for Kubernetes, and its boot."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

NODE_NAME: Final = "SPOTUNE_NODE"
"""Environment variable of the operator: the name of the pod's node."""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def node_name() -> str:
    """Name of the Kubernetes node; outside a pod, of the machine."""
    return os.environ.get(NODE_NAME) or socket.gethostname()


def boot_id() -> str:
    """Id that the kernel of this machine made when it started; all pods of a node have the same. Empty: not known."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
