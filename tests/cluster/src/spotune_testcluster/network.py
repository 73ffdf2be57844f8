"""The network of a cluster. All clusters have the same addresses, because each has its own network namespaces.

host 127.0.0.1:PORT --forward--> 10.99.0.1:6443 API server, DNS (cluster's namespace, bridge br0)
                                     |  veth
                                 10.99.0.11 node n1, pods 10.101.1.0/24 (bridge cni0)
                                 10.99.0.12 node n2, pods 10.101.2.0/24 ...
"""

import subprocess

CONTROL_PLANE = "10.99.0.1"
API_PORT = 6443
API_SERVER = f"https://{CONTROL_PLANE}:{API_PORT}"
PREFIX = 16
BRIDGE = "br0"
SERVICES = "10.96.0.0/16"
FIRST_SERVICE = "10.96.0.1"
PODS = "10.101.0.0/16"
DOMAIN = "cluster.local"
CUT_TABLE = "testcluster-cut"
NODE_LINK = "eth0"
"""Name of the interface in a node's namespace."""


def node_address(number: int) -> str:
    """The address of node `number`."""
    return f"10.99.0.{10 + number}"


def pod_network(number: int) -> str:
    """The network of the pods on node `number`."""
    return f"10.101.{number}.0/24"


def link(node: str) -> str:
    """Name of the veth interface to a node, in the cluster's namespace."""
    return f"v{node}"


def ip(*arguments: str, check: bool = True) -> None:
    """Run iproute2 in this process's network namespace."""
    subprocess.run(["ip", *arguments], check=check, capture_output=not check)


def make_bridge() -> None:
    """In the cluster's namespace: make the bridge of all nodes, with the control plane's address."""
    ip("link", "set", "lo", "up")
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("address", "add", f"{CONTROL_PLANE}/{PREFIX}", "dev", BRIDGE)
    ip("link", "set", BRIDGE, "up")
    ip("route", "add", SERVICES, "dev", BRIDGE)  # kube-proxy needs a route: the API server calls webhooks by Services


def plug_in(node: str, number: int, pid: int) -> None:
    """In the cluster's namespace: make a veth pair to the namespace of process `pid`, and the route to its pods."""
    ip("link", "delete", link(node), check=False)  # left if the kernel has not freed a dead node's namespace yet
    ip("link", "add", link(node), "type", "veth", "peer", "name", NODE_LINK, "netns", str(pid))
    ip("link", "set", link(node), "master", BRIDGE, "up")
    ip("route", "replace", pod_network(number), "via", node_address(number))


def configure_node(number: int) -> None:
    """In the node's namespace, once the veth interface exists: set its address and default route."""
    ip("link", "set", "lo", "up")
    ip("address", "add", f"{node_address(number)}/{PREFIX}", "dev", NODE_LINK)
    ip("link", "set", NODE_LINK, "up")
    ip("route", "add", "default", "via", CONTROL_PLANE)


def throttle(interface: str, rate: str) -> tuple[str, ...]:
    """Arguments of tc(8) that limit what an interface sends: by a token bucket.

    Kernels without the emulation of networks (netem) have it, too.
    """
    bucket = ("tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
    return ("qdisc", "replace", "dev", interface, "root", *bucket)


def end_throttle(interface: str) -> tuple[str, ...]:
    """Arguments of tc(8) that undo `throttle`."""
    return ("qdisc", "delete", "dev", interface, "root")


def block(addresses: list[str], *hooks: str) -> str:
    """The nft(8) script that drops packets from and to `addresses` at `hooks` (forward, output).

    With `forward` alone, the probes of the kubelet on the same node still pass.
    """
    found = ", ".join(addresses)
    rules = f"ip daddr {{ {found} }} drop; ip saddr {{ {found} }} drop;"
    chains = (f"chain {hook} {{ type filter hook {hook} priority -250; {rules} }}" for hook in hooks)
    return f"table inet {CUT_TABLE} {{\n" + "\n".join(chains) + "\n}"
