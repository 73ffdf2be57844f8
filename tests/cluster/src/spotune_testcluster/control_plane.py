"""PID 1 of a cluster: runs the control plane, and starts the nodes inside the cluster's namespaces."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spotune_testcluster import cgroups, linux, network, sandbox
from spotune_testcluster.errors import DidNotStartError, NotRunningError
from spotune_testcluster.home import ClusterFiles
from spotune_testcluster.init import Component, Init
from spotune_testcluster.settings import ClusterSettings, NodeSettings

ETCD = "http://127.0.0.1:2379"
ETCD_PEER = "http://127.0.0.1:2380"
NFTABLES_BY_DEFAULT = 31
"""The first minor version whose kube-proxy needs no feature gate for nftables."""
KUBERAY_HEALTH = "127.0.0.1:18082"
USERS = {  # kubeconfig: (user, group)
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "coredns": ("system:coredns", ""),
    "kube-proxy": ("system:kube-proxy", ""),
    "provisioner": ("provisioner", "system:masters"),
    "network-policy": ("network-policy", "system:masters"),
    "kuberay-operator": ("kuberay-operator", "system:masters"),
}

AUDIT_POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: None, userGroups: ["system:nodes"]}
- {level: None, users: ["system:apiserver", "system:kube-controller-manager", "system:kube-scheduler"]}
- {level: None, userGroups: ["system:serviceaccounts:kube-system"]}
- {level: Metadata}
"""


def run(files: ClusterFiles) -> None:
    """Run the cluster's init; does not return."""
    settings = ClusterSettings.model_validate_json(files.settings.read_text())
    sandbox.settle("control-plane")
    linux.bind(files.volumes, files.volumes)
    linux.propagate(files.volumes, linux.MountFlag.SHARED)
    sandbox.resolve_by(
        f"nameserver {network.CONTROL_PLANE}\nsearch svc.{network.DOMAIN} {network.DOMAIN}\noptions ndots:5\n"
    )
    network.make_bridge()
    init = Init(files.socket)
    Nodes(files, init)
    for name, component in components(files, settings).items():
        init.add(name, component)
    init.run()


class Nodes:
    """The nodes of the cluster: starts and kills them, and forgets those that have exited."""

    def __init__(self, files: ClusterFiles, init: Init) -> None:
        self._files = files
        self._init = init
        self._pids: dict[str, int] = {}
        init.on_death = self._forget
        init.operations |= {"start-node": self._start, "crash-node": self._crash, "nodes": self._list}

    def _start(self, question: Mapping[str, Any]) -> None:
        node = self._files.node(question["node"])
        self._init.reap()
        if node.name in self._pids:
            return
        settings = NodeSettings.model_validate_json(node.settings.read_text())
        command = [sys.executable, "-m", "spotune_testcluster.launch", "node", str(node.root)]
        launched = subprocess.run(command, capture_output=True, text=True, check=False)
        if launched.returncode != 0:
            raise DidNotStartError(f"node {node.name}: {launched.stderr.strip()}")
        pid = int(launched.stdout)
        self._pids[node.name] = pid
        network.plug_in(node.name, settings.number, pid)

    def _crash(self, question: Mapping[str, Any]) -> None:
        name = question["node"]
        self._init.reap()
        if name not in self._pids:
            raise NotRunningError(f"node {name} is not running; running nodes: {', '.join(self._pids) or 'none'}")
        os.kill(self._pids[name], signal.SIGKILL)
        os.waitid(os.P_PID, self._pids[name], os.WEXITED | os.WNOWAIT)
        self._init.reap()

    def _list(self, _question: Mapping[str, Any]) -> list[str]:
        self._init.reap()
        return sorted(self._pids)

    def _forget(self, pid: int) -> None:
        for name, running in list(self._pids.items()):
            if running == pid:
                del self._pids[name]
                cgroups.remove(name)


def components(files: ClusterFiles, settings: ClusterSettings) -> dict[str, Component]:
    """The components of the control plane, by their names."""
    commands = {
        "etcd": _etcd(files, settings),
        "kube-apiserver": _api_server(files, settings),
        "kube-controller-manager": _controller_manager(files, settings),
        "kube-scheduler": _scheduler(files, settings),
        "coredns": [str(settings.binaries / "coredns"), "-conf", str(files.root / "Corefile")],
        "kube-proxy": [str(settings.binaries / "kube-proxy"), f"--config={files.root / 'kube-proxy.json'}"],
        "provisioner": _provisioner(files, settings),
        "kuberay-operator": _kuberay(files, settings),
    }
    _write_files(files, settings)
    return {name: Component(command, files.logs / f"{name}.log") for name, command in commands.items()}


def _write_files(files: ClusterFiles, settings: ClusterSettings) -> None:
    (files.root / "audit-policy.yaml").write_text(AUDIT_POLICY)
    (files.root / "Corefile").write_text(
        f".:53 {{\n  bind {network.CONTROL_PLANE}\n  errors\n  kubernetes {network.DOMAIN} in-addr.arpa {{\n"
        f"    kubeconfig {files.pki / 'coredns.kubeconfig'}\n    ttl 1\n  }}\n  cache 1\n}}\n"
    )
    kubeconfig = files.pki / "kube-proxy.kubeconfig"
    write_kube_proxy(files.root / "kube-proxy.json", kubeconfig, "control-plane", settings.binaries)


def write_kube_proxy(path: Path, kubeconfig: Path, node: str, binaries: Path) -> None:
    """Write the configuration of kube-proxy for one network namespace."""
    config: dict[str, Any] = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": network.PODS,
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "hostnameOverride": node,
        "oomScoreAdj": 0,
        "metricsBindAddress": "127.0.0.1:10249",
        "healthzBindAddress": "127.0.0.1:10256",
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    if _minor(binaries / "kube-proxy") < NFTABLES_BY_DEFAULT:
        config["featureGates"] = {"NFTablesProxyMode": True}
    path.write_text(json.dumps(config))


def _minor(program: Path) -> int:
    """The minor version of a program of Kubernetes, which prints `Kubernetes v1.29.15`."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return int(said.split(".")[1])


def _etcd(files: ClusterFiles, settings: ClusterSettings) -> list[str]:
    return [
        str(settings.binaries / "etcd"),
        f"--data-dir={files.root / 'etcd'}",
        "--unsafe-no-fsync",  # a test cluster does not survive a reboot anyway
        "--log-level=warn",
        f"--listen-client-urls={ETCD}",
        f"--advertise-client-urls={ETCD}",
        f"--listen-peer-urls={ETCD_PEER}",
        f"--initial-advertise-peer-urls={ETCD_PEER}",
        f"--initial-cluster=default={ETCD_PEER}",
    ]


def _api_server(files: ClusterFiles, settings: ClusterSettings) -> list[str]:
    pki = files.pki
    return [
        str(settings.binaries / "kube-apiserver"),
        f"--etcd-servers={ETCD}",
        f"--bind-address={network.CONTROL_PLANE}",
        f"--advertise-address={network.CONTROL_PLANE}",
        f"--secure-port={network.API_PORT}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--service-account-issuer=https://kubernetes.default.svc.{network.DOMAIN}",
        f"--service-account-key-file={pki / 'sa.pub'}",
        f"--service-account-signing-key-file={pki / 'sa.key'}",
        f"--service-cluster-ip-range={network.SERVICES}",
        f"--kubelet-client-certificate={pki / 'kubelet-client.crt'}",
        f"--kubelet-client-key={pki / 'kubelet-client.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        "--endpoint-reconciler-type=lease",
        f"--audit-policy-file={files.root / 'audit-policy.yaml'}",
        f"--audit-log-path={files.audit_log}",
        "--audit-log-maxsize=200",
        "--audit-log-maxbackup=5",
        "--profiling=false",
    ]


def _controller_manager(files: ClusterFiles, settings: ClusterSettings) -> list[str]:
    return [
        str(settings.binaries / "kube-controller-manager"),
        *_as_user(files.pki / "controller-manager.kubeconfig"),
        f"--service-account-private-key-file={files.pki / 'sa.key'}",
        f"--root-ca-file={files.pki / 'ca.crt'}",
        "--use-service-account-credentials=true",
        "--node-monitor-grace-period=20s",
    ]


def _scheduler(files: ClusterFiles, settings: ClusterSettings) -> list[str]:
    return [str(settings.binaries / "kube-scheduler"), *_as_user(files.pki / "scheduler.kubeconfig")]


def _as_user(kubeconfig: Path) -> list[str]:
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        "--profiling=false",
    ]


def _provisioner(files: ClusterFiles, settings: ClusterSettings) -> list[str]:
    return [
        str(settings.binaries / "provisioner"),
        f"--kubeconfig={files.pki / 'provisioner.kubeconfig'}",
        f"--root={files.volumes}",
    ]


def _kuberay(files: ClusterFiles, settings: ClusterSettings) -> list[str]:
    return [
        str(settings.binaries / "ray-operator"),
        f"--kubeconfig={files.pki / 'kuberay-operator.kubeconfig'}",
        "--enable-leader-election=false",
        "--metrics-addr=127.0.0.1:18080",
        f"--health-probe-bind-address={KUBERAY_HEALTH}",
        "--log-stdout-encoder=json",
    ]
