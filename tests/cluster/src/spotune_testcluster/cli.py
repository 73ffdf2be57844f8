"""The command `spotune-testcluster`: a real Kubernetes with KubeRay on this machine, and the faults of a cloud."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from spotune_testcluster import binaries, faults, requirements, volumes
from spotune_testcluster.cluster import Cluster, list_clusters
from spotune_testcluster.errors import ClusterError
from spotune_testcluster.home import REPOSITORY, Home
from spotune_testcluster.images import build_images, build_layers, load_image
from spotune_testcluster.providers import Capacity, Provider
from spotune_testcluster.settings import NodeSettings

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="A real Kubernetes 1.34 with KubeRay on this machine, without Docker, and commands to inject faults.\n\n"
    "Example: `spotune-testcluster up --nodes 3 && export KUBECONFIG=$(spotune-testcluster kubeconfig)`",
)
node_app = typer.Typer(no_args_is_help=True, help="Add, crash, stop, start and label nodes.")
api_app = typer.Typer(no_args_is_help=True, help="Restart, pause and continue the API server.")
component_app = typer.Typer(no_args_is_help=True, help="Stop and start any component of the control plane.")
network_app = typer.Typer(
    no_args_is_help=True, help="Cut nodes and Services off the network, reconnect them, throttle nodes."
)
gpu_app = typer.Typer(no_args_is_help=True, help="Break and repair the fake GPUs of a node.")
volume_app = typer.Typer(no_args_is_help=True, help="Make a ReadWriteMany volume read-only, slow, or normal again.")
for group, title in (
    (node_app, "node"), (api_app, "apiserver"), (component_app, "component"), (network_app, "network"),
    (gpu_app, "gpu"), (volume_app, "volume"),
):  # fmt: skip
    app.add_typer(group, name=title)

out = Console(soft_wrap=True)
err = Console(stderr=True, soft_wrap=True)

Name = Annotated[
    str, typer.Option("--name", help="Name of the cluster; several can run here.", envvar="SPOTUNE_TESTCLUSTER")
]
NodeName = Annotated[str, typer.Argument(help="The node, as `kubectl get nodes` shows it.")]


def _report(line: str) -> None:
    err.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {line}")


def _since(start: float) -> str:
    return f"{time.monotonic() - start:.1f} s"


@app.command()
def check() -> None:
    """Check whether cluster tests can run on this machine; if not, print the reason and exit with code 1."""
    requirements.check()
    if not binaries.are_built(Home.default().root):
        requirements.check_go()


@app.command()
def packages() -> None:
    """Print the Debian packages that a cluster needs, for `apt-get install`."""
    sys.stdout.write(" ".join(requirements.packages()) + "\n")


@app.command()
def build() -> None:
    """Build all programs and images that a cluster needs, once: about 12 minutes on 2 cores.

    They are kept below ~/.cache/spotune-testcluster (or $SPOTUNE_TESTCLUSTER_HOME), under a key of go.sum.
    """
    start = time.monotonic()
    requirements.check()
    home = Home.default().root
    with ThreadPoolExecutor() as pool:
        built_layers = pool.submit(build_layers, home, REPOSITORY, _report)
        programs = binaries.build(home, _report)
        built_layers.result()
    build_images(home, REPOSITORY, programs / "gpuplugin", _report)
    _report(f"everything is built: {_since(start)}")


@app.command()
def up(
    name: Name = "default",
    nodes: Annotated[int, typer.Option(min=0, max=32, help="Number of nodes: n1, n2, ...")] = 3,
    provider: Annotated[
        Provider, typer.Option(help="The provider whose labels, taints and provider ids the nodes have.")
    ] = Provider.NONE,
    spot: Annotated[int, typer.Option(min=0, help="Number of spot nodes, counted from the last node back.")] = 0,
    gpus: Annotated[int, typer.Option(min=0, help="Fake GPUs per node (resource nvidia.com/gpu).")] = 0,
) -> None:
    """Bring a cluster up from any state. A running cluster gets the missing nodes.

    Examples: `spotune-testcluster up --nodes 3`; `spotune-testcluster up --provider aks --spot 2 --gpus 1`
    """
    start = time.monotonic()
    wanted = [
        NodeSettings(
            number=number, provider=provider, gpus=gpus,
            capacity=Capacity.SPOT if number > nodes - spot else Capacity.ON_DEMAND,
        )
        for number in range(1, nodes + 1)
    ]  # fmt: skip
    cluster = Cluster(name)
    cluster.up(wanted, _report)
    _report(f"up in {_since(start)}; export KUBECONFIG={cluster.files.kubeconfig}")


@app.command()
def down(
    name: Name = "default",
    everything: Annotated[bool, typer.Option("--all", help="All clusters of this machine.")] = False,
) -> None:
    """Stop a cluster and remove its files. The programs and images that were built are kept."""
    for cluster in list_clusters(Home.default()) if everything else [Cluster(name)]:
        start = time.monotonic()
        cluster.down()
        _report(f"cluster {cluster.name} is down: {_since(start)}")


@app.command()
def status(
    output: Annotated[str, typer.Option("--output", "-o", help="table or json.")] = "table",
) -> None:
    """List all clusters with their nodes and the components of their control planes."""
    found: list[dict[str, Any]] = []
    for cluster in list_clusters(Home.default()):
        running = cluster.is_running()
        found.append(
            {
                "name": cluster.name,
                "running": running,
                "kubeconfig": str(cluster.files.kubeconfig),
                "nodes": cluster.nodes() if running else {},
                "components": cluster.components() if running else {},
            }
        )
    if output == "json":
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    table = Table("Cluster", "State", "Nodes", "Not running", "Kubeconfig", box=None)
    for row in found:
        nodes = " ".join(node if alive else f"[red]{node}[/red]" for node, alive in row["nodes"].items())
        down_now = " ".join(part for part, state in row["components"].items() if not state["running"])
        table.add_row(
            row["name"], "running" if row["running"] else "[red]dead[/red]", nodes, down_now, row["kubeconfig"]
        )
    out.print(table if found else "no cluster; start one with: spotune-testcluster up")


@app.command()
def kubeconfig(name: Name = "default") -> None:
    """Print the path of the administrator's kubeconfig."""
    cluster = Cluster(name)
    cluster.settings()
    sys.stdout.write(f"{cluster.files.kubeconfig}\n")


@app.command()
def programs() -> None:
    """Print the folder of kubectl and Helm, for the PATH."""
    sys.stdout.write(f"{binaries.build(Home.default().root, _report)}\n")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def kubectl(context: typer.Context, name: Name = "default") -> NoReturn:
    """Run the cluster's own kubectl: `spotune-testcluster kubectl get nodes`."""
    program = Cluster(name).kubectl
    os.execv(program.program, ["kubectl", f"--kubeconfig={program.kubeconfig}", *context.args])


@app.command("load-image")
def load(
    archive: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="An OCI or Docker archive (.tar).")],
    name: Name = "default",
) -> None:
    """Import an image into every running node."""
    cluster = Cluster(name)
    for node, running in cluster.nodes().items():
        if running:
            load_image(cluster.way_in(node), archive)
            _report(f"{archive} is on {node}")


@node_app.command("add")
def node_add(
    name: Name = "default",
    provider: Annotated[
        Provider, typer.Option(help="The provider whose labels, taints and provider id the node has.")
    ] = Provider.NONE,
    spot: Annotated[bool, typer.Option("--spot", help="A spot node.")] = False,
    gpus: Annotated[int, typer.Option(min=0, help="Fake GPUs.")] = 0,
    zone: Annotated[str, typer.Option(help="Value of the zone label.")] = "",
) -> None:
    """Add a node and wait until it is Ready; prints its name."""
    cluster = Cluster(name)
    number = max((int(node.removeprefix("n")) for node in cluster.nodes()), default=0) + 1
    capacity = Capacity.SPOT if spot else Capacity.ON_DEMAND
    cluster.add_node(NodeSettings(number=number, provider=provider, capacity=capacity, gpus=gpus, zone=zone))
    sys.stdout.write(f"n{number}\n")


@node_app.command("crash")
def node_crash(node: NodeName, name: Name = "default") -> None:
    """Crash a node: all its processes are killed at once, without notice."""
    Cluster(name).crash_node(node)


@node_app.command("stop")
def node_stop(
    node: NodeName,
    name: Name = "default",
    seconds: Annotated[float, typer.Option(min=0, help="Time between SIGTERM and the end of the node.")] = 30,
) -> None:
    """Stop a node as a spot reclaim does: SIGTERM, a notice of some seconds, then everything is killed."""
    Cluster(name).stop_node(node, seconds)


@node_app.command("start")
def node_start(node: NodeName, name: Name = "default") -> None:
    """Start a crashed or stopped node again, with its disks, and wait until it is Ready."""
    Cluster(name).start_node(node)


@node_app.command("remove")
def node_remove(node: NodeName, name: Name = "default") -> None:
    """Remove a node for good: its processes, its disks and its Node object."""
    Cluster(name).remove_node(node)


@node_app.command("label")
def node_label(
    node: NodeName,
    labels: Annotated[list[str], typer.Argument(help="key=value to set, key- to remove.")],
    name: Name = "default",
) -> None:
    """Set or remove labels of a node: `spotune-testcluster node label n2 pool=spot old-`."""
    Cluster(name).kubectl("label", "node", node, "--overwrite", *labels)


@api_app.command("restart")
def api_restart(name: Name = "default") -> None:
    """Restart the API server and wait until it answers."""
    Cluster(name).component("restart", "kube-apiserver")


@api_app.command("pause")
def api_pause(
    name: Name = "default",
    seconds: Annotated[float, typer.Option(min=0, help="Continue after this time; 0: stay paused.")] = 0,
) -> None:
    """Freeze the API server: connections hang, as in an overloaded control plane."""
    cluster = Cluster(name)
    cluster.component("pause", "kube-apiserver")
    if seconds:
        time.sleep(seconds)
        cluster.component("continue", "kube-apiserver")


@api_app.command("continue")
def api_continue(name: Name = "default") -> None:
    """Continue a paused API server."""
    Cluster(name).component("continue", "kube-apiserver")


@component_app.command("stop")
def component_stop(component: str, name: Name = "default") -> None:
    """Stop a component such as kuberay-operator until it is started again."""
    Cluster(name).component("stop", component)


@component_app.command("start")
def component_start(component: str, name: Name = "default") -> None:
    """Start a stopped component."""
    Cluster(name).component("start", component)


@component_app.command("restart")
def component_restart(component: str, name: Name = "default") -> None:
    """Restart a component."""
    Cluster(name).component("restart", component)


Target = Annotated[str, typer.Argument(help="A node (n2), or a Service's pods (namespace/name).")]


@network_app.command("cut")
def network_cut(target: Target, name: Name = "default") -> None:
    """Cut a node or the pods of a Service off the network."""
    faults.cut(Cluster(name), target)


@network_app.command("restore")
def network_restore(target: Target, name: Name = "default") -> None:
    """Undo a cut."""
    faults.restore(Cluster(name), target)


@network_app.command("throttle")
def network_throttle(
    node: NodeName,
    rate: Annotated[str, typer.Argument(help="What it may send and receive: 80mbit; none: no limit.")],
    name: Name = "default",
) -> None:
    """Limit what a node and its pods send and receive: `spotune-testcluster network throttle n3 80mbit`."""
    if rate == "none":
        faults.end_throttle(Cluster(name), node)
    else:
        faults.throttle(Cluster(name), node, rate)


@gpu_app.command("set")
def gpu_set(
    node: NodeName,
    gpu: Annotated[str, typer.Argument(help="The GPU: GPU-0, GPU-1, ...")],
    state: Annotated[str, typer.Argument(help="healthy, failed (until the plugin restarts) or lost.")],
    name: Name = "default",
) -> None:
    """Break or repair a GPU: `spotune-testcluster gpu set n2 GPU-0 lost`."""
    Cluster(name).set_gpu(node, gpu, state)


@volume_app.command("set")
def volume_set(
    volume: Annotated[str, typer.Argument(help="The PersistentVolume.")],
    state: Annotated[volumes.VolumeState, typer.Argument(help="normal, read-only or slow.")],
    name: Name = "default",
) -> None:
    """Make a volume read-only (EROFS), slow (1 MiB/s) or normal again."""
    volumes.set_state(Cluster(name), volume, state)


def main() -> None:
    """Run the command. An expected error is printed as one sentence, with exit code 1."""
    try:
        app()
    except ClusterError as error:
        err.print(f"[red]Error:[/red] {error}", highlight=False)
        sys.exit(1)
    except subprocess.CalledProcessError as error:
        err.print(f"[red]Error:[/red] {' '.join(error.cmd)}: {error.stderr or error}", highlight=False)
        sys.exit(1)
