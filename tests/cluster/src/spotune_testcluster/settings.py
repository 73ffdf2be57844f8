"""Settings of a cluster and its nodes, saved as JSON for the processes inside and for later commands."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from spotune_testcluster.providers import Capacity, Provider


class Settings(BaseModel):
    """Base class: unknown fields are errors, and settings do not change after the start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(self.model_dump_json(indent=2))


class ClusterSettings(Settings):
    """One cluster.

    Attributes:
        binaries: The folder with kube-apiserver and all other programs.
        port: The API server's port on 127.0.0.1 of the host.
        template: A containerd root folder with every image, shared by the nodes.
        layers: The directories of the layers that are too large to import, by their kind.
    """

    binaries: Path
    port: int
    template: Path
    layers: dict[str, Path]


class NodeSettings(Settings):
    """One node.

    Attributes:
        number: 1 to 200. The node's address is 10.99.0.(10 + number), its pods' network is 10.101.number.0/24.
        provider: The provider whose labels, taints and provider id the node has.
        capacity: Spot or on-demand.
        gpus: Number of GPUs that its device plugin advertises.
        zone: Value of the zone label, "" for none.
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
