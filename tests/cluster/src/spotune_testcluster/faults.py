"""Network faults: cut a node off the network, throttle it, or make the pods of a Service unreachable."""

from spotune_testcluster import network
from spotune_testcluster.cluster import Cluster
from spotune_testcluster.errors import ClusterError


def cut(cluster: Cluster, target: str) -> None:
    """Cut a node (`n1`), or the pods of a Service (`namespace/name`), off the network.

    A node loses its network link: the API server gets no more heartbeats, but the node's pods keep running. The pods of
    a Service can neither be reached nor reach others, except for the probes of their node's kubelet.
    """
    if "/" not in target:
        _node_link(cluster, target, "down")
        return
    addresses = _addresses(cluster, target)
    restore_services(cluster)
    for node, running in cluster.nodes().items():
        if running:
            cluster.enter("nft", network.block(addresses, "forward"), node=node)
    cluster.enter("nft", network.block(addresses, "forward", "output"))


def restore(cluster: Cluster, target: str) -> None:
    """Undo `cut`, either that of a node or those of all Services."""
    if "/" in target:
        restore_services(cluster)
    else:
        _node_link(cluster, target, "up")


def restore_services(cluster: Cluster) -> None:
    """Undo the cuts of all Services."""
    for node in ["", *(name for name, running in cluster.nodes().items() if running)]:
        cluster.enter("nft", "delete", "table", "inet", network.CUT_TABLE, node=node, check=False)


def throttle(cluster: Cluster, node: str, rate: str) -> None:
    """Limit what a node and its pods send and receive, each to a rate in the units of tc(8), such as `80mbit`."""
    cluster.enter("tc", *network.throttle(network.link(node), rate))
    cluster.enter("tc", *network.throttle(network.NODE_LINK, rate), node=node)


def end_throttle(cluster: Cluster, node: str) -> None:
    """Undo `throttle`."""
    cluster.enter("tc", *network.end_throttle(network.link(node)), check=False)
    cluster.enter("tc", *network.end_throttle(network.NODE_LINK), node=node, check=False)


def _node_link(cluster: Cluster, node: str, state: str) -> None:
    settings = cluster.node_settings(node)
    cluster.enter("ip", "link", "set", network.link(node), state)
    if state == "up":  # the kernel removed the route to the node's pods with the link
        way = (network.pod_network(settings.number), "via", network.node_address(settings.number))
        cluster.enter("ip", "route", "replace", *way)


def _addresses(cluster: Cluster, target: str) -> list[str]:
    namespace, _, name = target.partition("/")
    slices = cluster.kubectl.within(namespace).get("endpointslices", f"--selector=kubernetes.io/service-name={name}")
    found = [address for piece in slices for point in piece.get("endpoints", []) for address in point["addresses"]]
    if not found:
        raise ClusterError(f"Service {target} has no pods to cut off")
    return sorted(set(found))
