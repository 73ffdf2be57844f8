"""What a cluster and its nodes are started with; kept as JSON, for the processes inside and for the next command."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from spotune_testcluster.providers import Capacity, Provider


class Settings(BaseModel):
    """Base: unknown fields are mistakes, and nothing changes after the start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(self.model_dump_json(indent=2))


class ClusterSettings(Settings):
    """One cluster.

    Attributes:
        binaries: The folder with kube-apiserver and all others.
        port: The API server's port on 127.0.0.1 of the host.
        template: A containerd root with every image, which nodes share.
        layers: The layers of images too large to import, by their kind.
    """

    binaries: Path
    port: int
    template: Path
    layers: dict[str, Path]


class NodeSettings(Settings):
    """One node.

    Attributes:
        number: 1 to 200; makes the node's address 10.99.0.(10 + number) and its pods' network 10.101.number.0/24.
        provider: Whose labels, taints and provider id the node carries.
        capacity: Spot or on-demand.
        gpus: How many GPUs its fake device plugin offers.
        zone: The zone in its topology label, "" for none.
    """

    number: int
    provider: Provider = Provider.NONE
    capacity: Capacity = Capacity.ON_DEMAND
    gpus: int = 0
    zone: str = ""

    @property
    def name(self) -> str:
        """The node's name."""
        return f"n{self.number}"
