"""PID 1 of a node: runs containerd, the kubelet, kube-proxy and the NetworkPolicy controller at their default paths."""

import json
import os
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spotune_testcluster import linux, network, providers, sandbox
from spotune_testcluster.control_plane import write_kube_proxy
from spotune_testcluster.home import ClusterFiles, NodeFiles
from spotune_testcluster.images import PAUSE, Images
from spotune_testcluster.init import Component, Init
from spotune_testcluster.settings import ClusterSettings, NodeSettings
from spotune_testcluster.template import mount_template
from spotune_testcluster.waiting import wait_for

SOCKET = "unix:///run/containerd/containerd.sock"
GPUS = Path("/run/testcluster/gpus")
GPU_LABEL = "testcluster.spotune.dev/gpu"

CONTAINERD = f"""version = 2
oom_score = 0
[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd-opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  disable_tcp_service = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/run/cni"
"""


def run(files: NodeFiles) -> None:
    """Run the node's init; does not return."""
    cluster = ClusterFiles(files.root.parents[1])
    settings = NodeSettings.model_validate_json(files.settings.read_text())
    shared = ClusterSettings.model_validate_json(cluster.settings.read_text())
    sandbox.settle(settings.name)
    linux.propagate("/", linux.MountFlag.SHARED)
    for shown, disk in (("/var/lib", files.var_lib), ("/var/log", files.var_log)):
        disk.mkdir(exist_ok=True)
        linux.bind(disk, shown)
        linux.propagate(shown, linux.MountFlag.SHARED)
    _filter_bridged_traffic()
    wait_for("the network link of the node", 10, lambda: Path("/sys/class/net/eth0").exists(), every=0.01)
    network.configure_node(settings.number)
    mount_template(
        Images(shared.template, shared.layers), Path("/var/lib/containerd"), link_root=files.var_lib / "containerd"
    )
    _write_files(files, cluster, shared, settings)
    init = Init(files.socket)
    init.operations |= {"shut-down": lambda question: _shut_down(init, question), "gpu": _set_gpu, "gpus": _gpus}
    for name, command in _commands(cluster, shared, settings).items():
        init.add(name, Component(command, cluster.logs / f"{name}-{settings.name}.log"))
    init.run()


def _commands(cluster: ClusterFiles, shared: ClusterSettings, settings: NodeSettings) -> dict[str, list[str]]:
    name = settings.name
    labels = {GPU_LABEL: str(settings.gpus > 0).lower()}
    labels |= providers.labels(settings.provider, settings.capacity, settings.gpus)
    if settings.zone:
        labels["topology.kubernetes.io/zone"] = settings.zone
    return {
        "containerd": ["containerd", "--config", "/run/containerd.toml"],
        "kubelet": [
            str(shared.binaries / "kubelet"),
            "--config=/run/kubelet.json",
            f"--kubeconfig={cluster.pki / f'kubelet-{name}.kubeconfig'}",
            f"--hostname-override={name}",
            f"--node-ip={network.node_address(settings.number)}",
            f"--node-labels={','.join(f'{key}={value}' for key, value in labels.items())}",
        ],
        "kube-proxy": [str(shared.binaries / "kube-proxy"), "--config=/run/kube-proxy.json"],
        "network-policy": [
            str(shared.binaries / "networkpolicy"),
            f"--kubeconfig={cluster.pki / 'network-policy.kubeconfig'}",
            f"--services={network.SERVICES}",
        ],
    }


def _write_files(files: NodeFiles, cluster: ClusterFiles, shared: ClusterSettings, settings: NodeSettings) -> None:
    GPUS.mkdir(parents=True)
    for index in range(settings.gpus):
        (GPUS / f"GPU-{index}").write_text("healthy")
    Path("/run/containerd.toml").write_text(CONTAINERD)
    Path("/run/kubelet.json").write_text(json.dumps(_kubelet(cluster, settings), indent=1))
    Path("/run/pod-resolv.conf").write_text("")
    kubeconfig = cluster.pki / "kube-proxy.kubeconfig"
    write_kube_proxy(Path("/run/kube-proxy.json"), kubeconfig, settings.name, shared.binaries)
    Path("/run/cni").mkdir()
    Path("/run/cni/10-testcluster.conflist").write_text(json.dumps(_cni(settings)))
    shutil.rmtree("/var/lib/cni", ignore_errors=True)  # addresses assigned before a crash


def _cni(settings: NodeSettings) -> dict[str, Any]:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": "/run/ipam",
            "ranges": [[{"subnet": network.pod_network(settings.number)}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    return {"cniVersion": "1.0.0", "name": "testcluster", "plugins": [bridge]}


def _kubelet(cluster: ClusterFiles, settings: NodeSettings) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": network.node_address(settings.number),
        "healthzBindAddress": "127.0.0.1",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(cluster.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "failSwapOn": False,
        "failCgroupV1": False,
        "containerRuntimeEndpoint": SOCKET,
        "clusterDNS": [network.CONTROL_PLANE],
        "clusterDomain": network.DOMAIN,
        "resolvConf": "/run/pod-resolv.conf",
        "oomScoreAdj": 0,
        "makeIPTablesUtilChains": False,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeStatusUpdateFrequency": "5s",
        "providerID": providers.provider_id(settings.provider, settings.name, settings.zone),
        "registerWithTaints": providers.taints(settings.provider, settings.capacity, settings.gpus),
    }


def _shut_down(init: Init, question: Mapping[str, Any]) -> None:
    """Shut the node down: kill the kubelet, send SIGTERM to all containers, wait for some seconds, exit."""
    for component in init.components.values():
        component.wanted = False
    if kubelet := init.components["kubelet"].process:
        kubelet.kill()
    own = {component.process.pid for component in init.components.values() if component.process}
    end = time.monotonic() + float(question["seconds"])
    for pid in _processes() - own:
        _send(pid, signal.SIGTERM)
    while _processes() - own and time.monotonic() < end:
        time.sleep(0.05)
        init.reap()
    os._exit(0)


def _processes() -> set[int]:
    """The processes in containers of this node: all but the init and helpers of the container runtime."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != "1":
            try:
                program = (entry / "cmdline").read_bytes().split(b"\0")[0]
            except OSError:  # exited meanwhile
                continue
            if program and not program.endswith((b"containerd-shim-runc-v2", b"pause")):
                found.add(int(entry.name))
    return found


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _set_gpu(question: Mapping[str, Any]) -> None:
    (GPUS / question["gpu"]).write_text(question["state"])


def _gpus(_question: Mapping[str, Any]) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(GPUS.iterdir())}


def _filter_bridged_traffic() -> None:
    """Send the traffic between pods of one node, which share a bridge, through the firewall. Off by default."""
    setting = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if setting.exists():
        setting.write_text("1\n")
