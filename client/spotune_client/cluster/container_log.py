"""The log of a container, read over several connections without repeating or skipping a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from spotune_client.cluster.api_errors import SilentError
from spotune_client.cluster.client import Cluster

StampedLine = tuple[datetime, str]


@dataclass
class ReadPosition:
    """How far a log was read: it filters out the lines that were already read.

    Attributes:
        last: Time of the last line; None before the first one.
        count: Number of lines read with this time.
    """

    last: datetime | None = None
    count: int = 0

    @property
    def parameters(self) -> dict[str, str]:
        """Query parameters that leave out lines before the last one; empty before the first one."""
        return {"sinceTime": self.last.isoformat()} if self.last is not None else {}

    def filter(self, lines: Iterable[str]) -> Iterator[StampedLine]:
        """Yield time and text of the lines not read before, given lines with the kubelet's timestamps, in order."""
        last, repeated = self.last, self.count
        for line in lines:
            stamp, _, text = line.partition(" ")
            try:
                moment = datetime.fromisoformat(stamp)
            except ValueError:  # a message of the kubelet without a time
                continue
            if last is not None and moment < last:
                continue
            if last is not None and moment == last and repeated:
                repeated -= 1
                continue
            self.count = self.count + 1 if moment == self.last else 1
            self.last = moment
            yield moment, text


def whole_log(cluster: Cluster, pod: str) -> Iterator[str]:
    """Yield all lines of a pod with one container until it terminates. A connection that is silent is replaced.

    Raises:
        KubernetesError: The user may not read the log, or the connection broke.
    """
    position, path = ReadPosition(), f"{cluster.path('pods', pod)}/log"
    while True:
        lines = cluster.lines(path, follow="true", timestamps="true", **position.parameters)
        try:
            yield from (text for _, text in position.filter(lines))
        except SilentError:
            continue
        return
