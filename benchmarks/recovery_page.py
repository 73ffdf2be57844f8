"""docs/recovery.md, of what `benchmarks/recovery.py` has measured.

python -m benchmarks.recovery_page > docs/recovery.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_RESULTS = Path(__file__).parent / "results"
_MEASURED = {
    "Now: ranks are forked ([ADR 18](adr/0018-ranks-are-forked.md))": _RESULTS / "recovery.json",
    "Before: every worker group imported everything anew": _RESULTS / "recovery_before.json",
}
_LOSSES = {
    "firstStart": "nothing: the first start",
    "headPodDeleted": "the head pod, deleted",
    "workerPodDeleted": "a worker pod, deleted",
    "workerPodDeletedByForce": "a worker pod, deleted by force",
    "workerProcessKilled": "a worker's process, killed",
}
_TEXT = """# Where the time of a recovery goes

Seconds from a loss to the first new step on a real Kubernetes with KubeRay
([tests/cluster](../tests/cluster/README.md)): medians of a few, by `benchmarks/recovery.py`, which says what each part
is. A tiny model, on a machine that does everything at once, and on different days: what compares is the parts of one
table.
"""


def page() -> str:
    """The page."""
    return "\n".join([_TEXT, *(line for title, path in _MEASURED.items() for line in _table(title, path))])


def _table(title: str, path: Path) -> Iterator[str]:
    measured: Mapping[str, Any] = json.loads(path.read_text())
    machine, losses = measured["machine"], measured["seconds"]
    parts = list(next(iter(losses.values()))["median"])
    yield f"## {title}"
    yield ""
    yield f"{machine['cores']} cores, {machine['date']}, `benchmarks/results/{path.name}`."
    yield ""
    yield f"| lost | {' | '.join(parts)} |"
    yield "|---" * (len(parts) + 1) + "|"
    for loss, found in losses.items():
        seconds = " | ".join(f"{found['median'][part]:.1f}" for part in parts)
        yield f"| {_LOSSES[loss]} | {seconds} |"
    yield ""


if __name__ == "__main__":
    sys.stdout.write(page())
