"""Short schedules that once failed: each was reduced from the schedule of a seed, and passes since the mend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spotune_testcluster.pytest_plugin import ClusterUnderTest
from tests.cluster import chaos
from tests.cluster.chaos.chaos_run import ChaosBench
from tests.cluster.chaos.command import SCHEDULES
from tests.cluster.chaos.schedule import from_json
from tests.cluster.chaos.serving.service import service_under_chaos
from tests.cluster.finetune_jobs import Workplace
from tests.cluster.operator_install import Operator

KEPT = sorted(SCHEDULES.glob("*.json"))


@pytest.fixture(scope="module")
def bench(
    cluster: ClusterUnderTest, operator: Operator, workplace: Workplace, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ChaosBench]:
    with operator.with_values("serving.enabled=true"), service_under_chaos(workplace) as service:
        yield ChaosBench(cluster, operator, workplace, service, tmp_path_factory.mktemp("chaos"))


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(2400 * max(len(KEPT), 1))
def test_kept_schedules_pass(bench: ChaosBench) -> None:
    records = {path.stem: bench.run(from_json(path.read_text())) for path in KEPT}
    assert {name: record.findings for name, record in records.items() if record.findings} == {}


def test_kept_schedules_are_short() -> None:
    assert Path(chaos.__file__).parent / "schedules" == SCHEDULES
    for path in KEPT:
        assert 0 < len(from_json(path.read_text()).faults) <= 10, path
