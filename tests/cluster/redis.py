"""A Redis in a pod of the test cluster, from Debian's package `redis-tools`: its redis-check-rdb is also the server."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from spotune_testcluster import oci
from spotune_testcluster.cluster import Cluster
from spotune_testcluster.images import load_image
from spotune_testcluster.kubectl import Kubectl
from tests.cluster.pods import pod, restricted, wait_until_running

NAME = "redis"
PORT = 6379
_IMAGE = "testcluster.local/redis:1"
_PROGRAM = "redis-check-rdb"
"""Redis is one program; the name that it is called by says what it does."""
_COMMAND = ("/redis-server", "--save", "", "--appendonly", "no", "--protected-mode", "no", "--port", str(PORT))


def start_redis(machine: Cluster, kubectl: Kubectl, node: str) -> str:
    """Start a Redis that keeps everything in memory; returns its address."""
    _load_image(machine, node)
    manifest = restricted(pod(NAME, _IMAGE, _COMMAND, node=node, labels={"app": NAME}))
    ports = [{"port": PORT}]
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME}}
    kubectl.apply(service | {"spec": {"selector": {"app": NAME}, "ports": ports}})
    kubectl.apply(manifest)
    wait_until_running(kubectl, NAME)
    return f"{NAME}.{kubectl.namespace}.svc:{PORT}"


def _load_image(machine: Cluster, node: str) -> None:
    program = shutil.which(_PROGRAM)
    if program is None:
        pytest.skip("Redis is not installed: apt-get install --no-install-recommends redis-tools")
    with tempfile.TemporaryDirectory() as folder:
        layer, archive = Path(folder) / "layer.tar", Path(folder) / "image.tar"
        files = {library.lstrip("/"): (Path(library).read_bytes(), 0o755) for library in _libraries(program)}
        oci.write_layer(layer, files | {"redis-server": (Path(program).read_bytes(), 0o755)})
        oci.write_archive([oci.Image(_IMAGE, [layer], user="1000")], archive)
        load_image(machine.way_in(node), archive)


def _libraries(program: str) -> list[str]:
    """Paths of the shared libraries of a program, and of the loader."""
    printed = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    return re.findall(r"(/\S+) \(0x", printed)
