"""The trainer's environment in pods: complete, for any user, with valid bytecode, without a copy on each node."""

import subprocess
import sys
from pathlib import Path

import pytest

from spotune_testcluster import oci
from spotune_testcluster.base_image import compile_pause
from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from tests.cluster.pods import pod, restricted, run_in, wait_until_done, wait_until_running

pytestmark = pytest.mark.cluster

IMPORTS = "import deepspeed, ray, spotune_trainer, streaming, torch, transformers; print('imported')"
# Python recompiles a .pyc at every import if it does not match the source's time and size (PEP 552).
STALE = """
import importlib.util, pathlib, struct, torch, transformers, spotune_trainer
stale = []
for package in (torch, transformers, spotune_trainer):
    pattern = "**/*.py" if package is spotune_trainer else "*.py"
    for source in sorted(pathlib.Path(package.__file__).parent.glob(pattern)):
        cached = pathlib.Path(importlib.util.cache_from_source(str(source)))
        if cached.exists():
            time, size = struct.unpack("<8x2I", cached.read_bytes()[:16])
            found = source.stat()
            if (time, size) != (int(found.st_mtime) & 0xFFFFFFFF, found.st_size & 0xFFFFFFFF):
                stale.append(source.name)
print("stale:", stale)
"""
BYTES_OF_A_NODE = 500 << 20


def test_restricted_pod_imports_all_the_trainer_needs(cluster: ClusterUnderTest, namespace: Kubectl) -> None:
    namespace("label", "namespace", namespace.namespace, "pod-security.kubernetes.io/enforce=restricted")
    namespace.apply(restricted(pod("imports", cluster.image, ("python", "-c", IMPORTS), node=cluster.nodes[1])))
    assert wait_until_done(namespace, "imports", 240) == "Succeeded", namespace("logs", "imports")
    assert "imported" in namespace("logs", "imports")


def test_bytecode_is_valid_in_pods(cluster: ClusterUnderTest, namespace: Kubectl) -> None:
    namespace.apply(pod("checks", cluster.image, node=cluster.nodes[-1]))
    wait_until_running(namespace, "checks")
    assert "stale: []" in run_in(namespace, "checks", "python", "-c", STALE)


def test_nodes_hold_no_copy_of_the_environment(cluster: ClusterUnderTest) -> None:
    disk = cluster.machine_for("a look at the nodes' disks").files.node("n2").root
    du = ["du", "--summarize", "--bytes", str(disk)]
    used = subprocess.run(du, capture_output=True, text=True, check=False).stdout  # it fails if a file goes meanwhile
    assert 0 < int(used.split()[0]) < BYTES_OF_A_NODE


def test_loaded_image_runs_on_every_node(cluster: ClusterUnderTest, namespace: Kubectl, tmp_path: Path) -> None:
    machine = cluster.machine_for("load-image")
    compile_pause(tmp_path / "pause")
    oci.write_layer(tmp_path / "layer.tar", {"pause": ((tmp_path / "pause").read_bytes(), 0o755)})
    image = oci.Image("testcluster.local/loaded:1", [tmp_path / "layer.tar"], entrypoint=["/pause"])
    oci.write_archive([image], tmp_path / "image.tar")
    tool = [sys.executable, "-m", "spotune_testcluster", "load-image", str(tmp_path / "image.tar")]
    subprocess.run([*tool, "--name", machine.name], check=True, capture_output=True)
    namespace.apply(*(pod(node, image.name, ("/pause",), node=node) for node in cluster.nodes))
    wait_until_running(namespace, *cluster.nodes)
