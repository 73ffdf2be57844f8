"""The name of this node, for people and for Kubernetes."""

from __future__ import annotations

import os
import socket
from typing import Final

NODE_NAME: Final = "SPOTUNE_NODE"
"""Environment variable of the operator: the name of the pod's node."""


def node_name() -> str:
    """Name of the Kubernetes node; outside a pod, of the machine."""
    return os.environ.get(NODE_NAME) or socket.gethostname()
