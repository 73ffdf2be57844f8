"""The named ports of the pods of jobs and services."""

from dataclasses import dataclass
from typing import Any

from spotune.custom_resource.object_names import PROGRESS_PORT


@dataclass(frozen=True)
class Port:
    """A named TCP port."""

    name: str
    number: int

    def of_container(self) -> dict[str, Any]:
        """The ``v1.ContainerPort`` for it."""
        return {"name": self.name, "containerPort": self.number, "protocol": "TCP"}


GCS = Port("gcs-server", 6379)
DASHBOARD = Port("dashboard", 8265)
METRICS = Port("metrics", 8080)
PROGRESS = Port("progress", PROGRESS_PORT)
SERVE = Port("serve", 8000)
"""Of the gateway. KubeRay requires the name on the head, too, where nothing listens."""
