"""docs/support.md: which versions work together, from the records of the tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from spotune_operator.kube.requirements import OLDEST_KUBERAY, OLDEST_KUBERNETES
from spotune_testcluster import binaries
from tests.versions.records import FAST, Record, Versions

PYTHONS = ("3.12", "3.13")
"""Besides 3.11, with which all tests run."""
NUM_FAULTS = 5
_RAYS = 2
_TEXT = """# Supported versions

Which versions of Kubernetes, KubeRay, Ray and Python spotune works with, and what was tested.
`python -m tests.versions page` writes this page from the records in
`benchmarks/results/versions.jsonl`. Do not edit it.

| part | supported | why not older | what refuses older ones |
|---|---|---|---|
| Kubernetes | {kubernetes} or newer | the rules in the CRDs (CEL with `fieldPath` and `reason`) exist \
since 1.28, and since 1.29 no API server can switch them off; `policies.enabled` of the chart needs 1.30 \
(`ValidatingAdmissionPolicy` v1) | the chart, the operator at its start, `spotune doctor` |
| KubeRay | {kuberay} or newer | `authOptions` of a RayCluster: the first version in which Ray's tokens work \
| the chart, the operator at its start (both by the CRD, so they accept 1.5.0), `spotune doctor` |
| Ray | 2.60 or newer | not tested | `pip`, for the packages; the images contain theirs |
| Python | 3.11 or newer | `enum.StrEnum` and `typing.Self` | `pip` |

Newer versions are not refused. What was really run stands below, and so does what was not.

## Fast tests

All tests that need neither Ray, nor a cluster, nor rank processes (`make test-fast`), with the
same pinned versions of all other packages.

{fast}
## Faults on a cluster

Five faults of [the fault suite](faults.md), with all of its checks: a worker process, the head,
the operator, the API server, and the node of the head. The job has two workers on CPUs.

{faults}
The whole suite runs with Kubernetes {default} and the pinned versions of everything else
([results](faults.md)).

Not run yet:

{missing}
Nodes are older than the control plane where the folder of a version builds no kubelet. Kubernetes
supports nodes that are up to three minors older.

## Run them

```console
$ .venv/bin/python -m tests.versions fast --python python3.12
$ .venv/bin/python -m tests.versions faults --kubernetes 1.29 --kuberay 1.5
$ .venv/bin/python -m tests.versions page
```

A command tests the current commit, and skips what has passed with the same versions. Another minor
of Kubernetes or KubeRay is a folder with a `go.mod` in `tests/cluster/kubernetes` or
`tests/cluster/kuberay`.

## What goes wrong

| message | what to do |
|---|---|
| `chart requires kubeVersion: >=1.29.0-0 which is incompatible with Kubernetes ...` | upgrade the cluster |
| `KubeRay is not installed in this cluster` | install KubeRay first. To install it later, set \
`kuberay.check=false`: the operator waits for it |
| `KubeRay is older than 1.5` | upgrade KubeRay and its CRDs: `helm upgrade` leaves CRDs as they are |
| `policies.enabled needs Kubernetes 1.30` | upgrade the cluster, or install without the policies |
| the operator is not ready, and its log has `waiting: ...` | the rest of the line says what is missing. It \
looks again every two seconds |
"""


def page(records: Sequence[Record]) -> str:
    """The page as Markdown."""
    fast = [record for record in records if record.test == FAST]
    faults = [record for record in records if record.test != FAST]
    return _TEXT.format(
        kubernetes=_dotted(OLDEST_KUBERNETES),
        kuberay=_dotted(OLDEST_KUBERAY),
        fast=_table(_fast_rows(fast)),
        faults=_table(_fault_rows(faults)),
        default=binaries.KUBERNETES.removeprefix("v"),
        missing="".join(f"- {each}\n" for each in _missing(fast, faults)) or "- nothing\n",
    )


def _missing(fast: Sequence[Record], faults: Sequence[Record]) -> Iterator[str]:
    """What this repository can test, and has no record of."""
    for minor in PYTHONS:
        if not any(record.versions.python.startswith(f"{minor}.") for record in fast):
            yield f"the fast tests with Python {minor}"
    for folder, title in (("kubernetes", "Kubernetes"), ("kuberay", "KubeRay")):
        for version in sorted(path.parent.name for path in (binaries.SOURCES / folder).glob("*/go.mod")):
            count = sum(getattr(record.versions, folder).startswith(f"{version}.") for record in faults)
            if count < NUM_FAULTS:
                yield f"{NUM_FAULTS - count} of {NUM_FAULTS} faults with {title} {version}"
    if len({record.versions.ray for record in faults}) < _RAYS:
        yield "a second version of Ray (2.60 is the newest at the package index)"


def _fast_rows(records: Iterable[Record]) -> Iterator[tuple[str, ...]]:
    yield "Python", "Ray", "result", "commit", "date"
    for record in sorted(records, key=lambda each: _number(each.versions.python)):
        counts = ", ".join(f"{count:,} {outcome}" for outcome, count in record.counts.items() if count)
        result = counts if record.passed else f"**{counts}**: {record.result}"
        yield record.versions.python, record.versions.ray, result, f"`{record.commit}`", record.date


def _fault_rows(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    yield "Kubernetes", "nodes", "KubeRay", "Ray", "Python", "result", "commits", "date"
    for versions in sorted({record.versions for record in records}, key=_order):
        found = [record for record in records if record.versions == versions]
        passed = sum(record.passed for record in found)
        failed = "".join(f"; **{each.test}**: {each.result}" for each in found if not each.passed)
        commits = ", ".join(sorted({f"`{record.commit}`" for record in found}))
        versions_cells = (versions.kubernetes, versions.nodes, versions.kuberay, versions.ray, versions.python)
        yield *versions_cells, f"{passed} of {len(found)} passed{failed}", commits, max(each.date for each in found)


def _table(rows: Iterator[tuple[str, ...]]) -> str:
    heading, *others = rows
    if not others:
        return "Not run yet.\n"
    lines = [heading, ("---",) * len(heading), *others]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def _order(versions: Versions) -> tuple[tuple[int, ...], ...]:
    return _number(versions.kubernetes), _number(versions.kuberay), _number(versions.ray), _number(versions.python)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
