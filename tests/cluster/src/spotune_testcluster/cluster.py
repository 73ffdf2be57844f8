"""One cluster, controlled from the host: up from any state, changed while it runs, removed without a trace."""

import contextlib
import fcntl
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spotune_testcluster import binaries, cgroups, network, requirements, volumes
from spotune_testcluster.control_plane import KUBERAY_HEALTH, USERS
from spotune_testcluster.errors import ClusterError, DidNotStartError, NotRunningError
from spotune_testcluster.home import REPOSITORY, ClusterFiles, Home
from spotune_testcluster.images import Images, build_images, prune_images
from spotune_testcluster.init import ask, process_id
from spotune_testcluster.kubectl import Kubectl, KubectlError
from spotune_testcluster.pki import Authority
from spotune_testcluster.settings import ClusterSettings, NodeSettings
from spotune_testcluster.waiting import wait_for

MANIFESTS = Path(__file__).parent / "manifests"
CONTEXT = "spotune-testcluster"
API_SERVER_NAMES = (
    "localhost",
    "127.0.0.1",
    network.CONTROL_PLANE,
    network.FIRST_SERVICE,
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    f"kubernetes.default.svc.{network.DOMAIN}",
)
SECONDS_TO_START = 120.0
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_UNPRIVILEGED_PORT = 1024
PORTS_TO_TRY = 5000
"""Number of ports below those that the kernel chooses from: another process may get one of these before it is used."""

Report = Callable[[str], None]


class Cluster:
    """The test cluster of a name; it need not exist yet."""

    def __init__(self, name: str = "default", home: Home | None = None) -> None:
        self.home = home or Home.default()
        self.files: ClusterFiles = self.home.cluster(name)
        self.name = name

    # -- up and down ------------------------------------------------------------------------------------------------

    def up(self, nodes: Sequence[NodeSettings], report: Report) -> None:
        """Bring the cluster up with at least `nodes`, from any state.

        A running cluster keeps its content and gets the missing nodes. The remains of a crash are removed first.

        Args:
            nodes: The nodes to have. An existing node of the same name keeps its settings.
            report: Called with a line per stage.

        Raises:
            CannotRunHereError: A requirement is missing on this machine; the message names what to install.
            DidNotStartError: A component did not become ready; the message names its log.
        """
        requirements.check()
        with self._locked():
            if not self.is_running():
                self._remove_what_is_left()
                self._start_control_plane(report)
            else:
                self._start_forwarder(self.settings())
            self._wait_for_api()
            report("API server ready")
            running = set(ask(self.files.socket, "nodes"))
            missing = [node for node in nodes if node.name not in running]
            for node in missing:
                self._start_node(node)
            self._apply_manifests()
            report("KubeRay, storage classes and device plugin applied")
            for node in missing:
                self._wait_for_node(node)
                report(f"node {node.name} ready")
            self._wait_for_kuberay()

    def down(self) -> None:
        """Kill all processes of the cluster and remove its files. Does nothing if there is no cluster."""
        if not self.home.root.exists():
            return
        with self._locked():
            self._remove_what_is_left()

    def is_running(self) -> bool:
        """Whether its init responds."""
        return process_id(self.files.socket) is not None

    def settings(self) -> ClusterSettings:
        """The settings that the cluster was started with."""
        if not self.files.settings.exists():
            raise NotRunningError(f"there is no cluster {self.name!r}; start one with: spotune-testcluster up")
        return ClusterSettings.model_validate_json(self.files.settings.read_text())

    @property
    def kubectl(self) -> Kubectl:
        """Kubectl with the rights of the administrator."""
        return Kubectl(str(self.settings().binaries / "kubectl"), self.files.kubeconfig)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def nodes(self) -> dict[str, bool]:
        """Every node that was started and not removed, and whether it is running."""
        self.settings()
        running = set(ask(self.files.socket, "nodes")) if self.is_running() else set()
        known = {path.name for path in self.files.nodes.iterdir()} if self.files.nodes.exists() else set()
        return {name: name in running for name in sorted(known | running)}

    def add_node(self, settings: NodeSettings) -> None:
        """Start a node, which may be new, crashed or stopped, and wait until it is Ready."""
        if not self.is_running():
            raise NotRunningError(f"cluster {self.name!r} is not running; start it with: spotune-testcluster up")
        self._start_node(settings)
        self._wait_for_node(settings)

    def start_node(self, name: str) -> None:
        """Start a crashed or stopped node with its disks, and wait until it is Ready."""
        self.add_node(self.node_settings(name))

    def crash_node(self, name: str) -> None:
        """Crash a node, as at a power cut: SIGKILL to all its processes at once. Its disks are kept."""
        ask(self.files.socket, "crash-node", node=name)

    def stop_node(self, name: str, seconds: float = 30) -> None:
        """Stop a node, as at a spot reclaim: SIGTERM to its containers, SIGKILL after at most `seconds`."""
        node = self.files.node(name)
        pid = process_id(node.socket)
        if pid is None:
            raise NotRunningError(f"node {name} is not running")
        pidfd = os.pidfd_open(pid)
        try:
            self._ask_node(name, "shut-down", seconds=seconds)
        except NotRunningError:  # it exits without a response
            pass
        finally:
            os.close(pidfd)
        wait_for(f"end of node {name}", seconds + 10, lambda: name not in ask(self.files.socket, "nodes"))

    def remove_node(self, name: str) -> None:
        """Remove a node for good: its processes, its disks and its Node object."""
        if self.nodes().get(name):
            self.crash_node(name)
        shutil.rmtree(self.files.node(name).root, ignore_errors=True)
        self.kubectl("delete", "node", name, "--ignore-not-found", "--wait=false")

    def node_settings(self, name: str) -> NodeSettings:
        """The settings that a node was started with."""
        path = self.files.node(name).settings
        if not path.exists():
            raise NotRunningError(f"there is no node {name!r}, only {', '.join(self.nodes()) or 'none'}")
        return NodeSettings.model_validate_json(path.read_text())

    def set_gpu(self, node: str, gpu: str, state: str) -> None:
        """Make a GPU of a node healthy, failed (an XID error, until the plugin restarts) or lost (off the bus)."""
        if state not in {"healthy", "failed", "lost"}:
            raise ClusterError(f"the state of a GPU must be healthy, failed or lost, not {state!r}")
        known = self._ask_node(node, "gpus")
        if gpu not in known:
            raise ClusterError(f"node {node} has no {gpu}; its GPUs: {', '.join(known) or 'none'}")
        self._ask_node(node, "gpu", gpu=gpu, state=state)

    # -- control plane ----------------------------------------------------------------------------------------------

    def component(self, do: str, component: str) -> None:
        """Stop, start, restart, pause (SIGSTOP) or continue a control plane component; wait until the API is ready."""
        ask(self.files.socket, do, component=component)
        if component == "kube-apiserver" and do in {"start", "restart", "continue"}:
            self._wait_for_api()

    def components(self) -> dict[str, dict[str, Any]]:
        """The components of the control plane: whether each is running, should run, and how often it was started."""
        found: dict[str, dict[str, Any]] = ask(self.files.socket, "status")
        return found

    def enter(self, *command: str, node: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command inside the namespaces of the control plane or of a node."""
        return subprocess.run([*self.way_in(node), *command], capture_output=True, text=True, check=check)

    def way_in(self, node: str = "") -> list[str]:
        """The prefix of a command line that runs a command inside the namespaces of the control plane or of a node."""
        path = self.files.node(node).socket if node else self.files.socket
        pid = process_id(path)
        if pid is None:
            raise NotRunningError(f"{'node ' + node if node else 'cluster ' + repr(self.name)} is not running")
        return ["nsenter", "--target", str(pid), "--mount", "--net", "--pid", "--uts", "--ipc"]

    # -- how it is done ---------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Allow one `up` or `down` of a cluster at a time. The kernel releases the lock when this process dies."""
        self.home.clusters.mkdir(parents=True, exist_ok=True)
        with (self.home.clusters / f".{self.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _start_control_plane(self, report: Report) -> None:
        programs = binaries.build(self.home.root, report)
        images = build_images(self.home.root, REPOSITORY, programs / "gpuplugin", report)
        for folder in (self.files.logs, self.files.volumes, self.files.nodes):
            folder.mkdir(parents=True, exist_ok=True)
        settings = ClusterSettings(
            binaries=programs, port=free_port(), template=images.template, layers=dict(images.layers)
        )
        self._write_certificates(settings)
        settings.save(self.files.settings)
        prune_images(self.home.root, [_images(cluster.settings()) for cluster in list_clusters(self.home)])
        command = [sys.executable, "-m", "spotune_testcluster.launch", "cluster", str(self.files.root)]
        launched = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
        if launched.returncode != 0:
            raise DidNotStartError(f"the cluster's namespaces: {launched.stderr.strip()}")
        wait_for(f"the cluster's init (see {self.files.root / 'init.log'})", SECONDS_TO_START, self.is_running)
        self._start_forwarder(settings)

    def _write_certificates(self, settings: ClusterSettings) -> None:
        authority = Authority(self.files.pki)
        authority.service_account_keys()
        authority.issue("apiserver", "kube-apiserver", addresses=API_SERVER_NAMES)
        authority.issue("kubelet-client", "kube-apiserver-kubelet-client", "system:masters")
        for file, (user, group) in USERS.items():
            authority.kubeconfig(self.files.pki / f"{file}.kubeconfig", CONTEXT, network.API_SERVER, user, group)
        here = f"https://127.0.0.1:{settings.port}"
        authority.kubeconfig(self.files.kubeconfig, CONTEXT, here, "administrator", "system:masters")

    def _start_forwarder(self, settings: ClusterSettings) -> None:
        """Start the forwarder if none is listening. A killed `up` may have left one."""
        if _listens(settings.port):
            return
        command = [sys.executable, "-m", "spotune_testcluster.forward", str(self.files.root), str(settings.port)]
        with (self.files.logs / "forward.log").open("ab") as log:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False, env=_environment()
            )
        if done.returncode != 0 and not _listens(settings.port):
            raise DidNotStartError(f"the forwarder to the API server did not start: see {log.name}")

    def _wait_for_api(self) -> None:
        def ready() -> bool:
            return self._answers() and bool(self.kubectl("get", "serviceaccount", "default", "--ignore-not-found"))

        wait_for(f"the API server (see {self.files.logs / 'kube-apiserver.log'})", SECONDS_TO_START, ready)

    def _answers(self) -> bool:
        try:
            return self.kubectl("get", "--raw=/readyz", timeout=5).strip() == "ok"
        except (KubectlError, subprocess.TimeoutExpired):
            return False

    def _apply_manifests(self) -> None:
        crds = (self.settings().binaries / "kuberay-crds").resolve()
        self.kubectl("apply", "--server-side", f"--filename={crds}")
        self.kubectl("apply", "--server-side", f"--filename={MANIFESTS}")

    def _wait_for_kuberay(self) -> None:
        def ready() -> bool:
            return self.enter("curl", "-sf", f"http://{KUBERAY_HEALTH}/readyz", check=False).returncode == 0

        wait_for(f"KubeRay (see {self.files.logs / 'kuberay-operator.log'})", SECONDS_TO_START, ready)

    def _start_node(self, settings: NodeSettings) -> None:
        node = self.files.node(settings.name)
        node.root.mkdir(parents=True, exist_ok=True)
        settings.save(node.settings)
        kubeconfig = self.files.pki / f"kubelet-{node.name}.kubeconfig"
        user = f"system:node:{node.name}"
        Authority(self.files.pki).kubeconfig(kubeconfig, CONTEXT, network.API_SERVER, user, "system:nodes")
        ask(self.files.socket, "start-node", node=settings.name)

    def _wait_for_node(self, settings: NodeSettings) -> None:
        """Wait until the node is Ready by a new heartbeat: after a crash the object still has the old status."""
        since = datetime.now(UTC).replace(microsecond=0)

        def ready() -> bool:
            if settings.name not in ask(self.files.socket, "nodes"):
                raise DidNotStartError(
                    f"node {settings.name} exited: see {self.files.node(settings.name).root / 'init.log'}"
                )
            found = self.kubectl.get("nodes", f"--field-selector=metadata.name={settings.name}")
            conditions = {
                condition["type"]: condition for node in found for condition in node["status"].get("conditions", [])
            }
            state = conditions.get("Ready", {})
            return state.get("status") == "True" and datetime.fromisoformat(state["lastHeartbeatTime"]) >= since

        log = self.files.logs / f"kubelet-{settings.name}.log"
        wait_for(f"node {settings.name} (see {log})", SECONDS_TO_START, ready, every=0.2)

    def _ask_node(self, name: str, do: str, **details: Any) -> Any:
        return ask(self.files.node(name).socket, do, **details)

    def _remove_what_is_left(self) -> None:
        """Kill all processes by their control group, which needs no records; then remove their files."""
        cgroups.kill(self.files.group)
        cgroups.remove(self.files.group)
        volumes.forget(self.files.volumes)
        if self.files.root.exists():
            doomed = self.files.root.with_name(f".{self.name}.{secrets.token_hex(4)}")
            self.files.root.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        for abandoned in self.home.clusters.glob(f".{self.name}.*[0-9a-f]"):
            if abandoned.is_dir():
                shutil.rmtree(abandoned, ignore_errors=True)


def list_clusters(home: Home) -> list[Cluster]:
    """All clusters that were started and not removed, running or not."""
    if not home.clusters.exists():
        return []
    names = [path.parent.name for path in sorted(home.clusters.glob("[!.]*/settings.json"))]
    return [Cluster(name, home) for name in names]


def _images(settings: ClusterSettings) -> Images:
    return Images(settings.template, settings.layers)


def _environment() -> dict[str, str]:
    """The environment of background processes, without variables for this command only (coverage, proxies)."""
    kept = ("PATH", "LANG", "TZ", "VIRTUAL_ENV")
    return {name: os.environ[name] for name in kept if name in os.environ}


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """A free port of 127.0.0.1; if possible one that the kernel gives to no other process that asks for any port."""
    lowest = int(EPHEMERAL_PORTS.read_text().split()[0])
    below = range(max(lowest - PORTS_TO_TRY, FIRST_UNPRIVILEGED_PORT), lowest)
    for port in (*random.sample(below, len(below)), 0):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            chosen: int = found.getsockname()[1]
            return chosen
    raise ClusterError("no port of 127.0.0.1 is free")
