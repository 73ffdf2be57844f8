"""A node whose connection is throttled is left out, on a real Ray of three nodes; the model is the undisturbed one.

The agents of the nodes pull bytes from one another over TCP, as in a cluster. Those of the bad node wait for each byte
that they send and receive.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.worker_group.result import Slots, Trained
from tests.proof import injected
from tests.trainer.support.agent_cluster import LAYOUT, Cluster, next_task, started_cluster, until
from tests.trainer.support.runs import STEPS_PER_EPOCH, Runs, committed_state, sample_hashes, train_generation

pytestmark = [pytest.mark.ray, pytest.mark.long]

EPOCHS = 2
THROTTLE = """\
import os
import time

from after_import import after_import

BYTES_PER_SECOND = 10e6


def throttle(module):
    if os.environ.get("SPOTUNE_NODE") != "n3":
        return
    connection = module.PeerConnection
    send, receive = connection._send_all, connection._receive_into

    def send_slowly(self, content):
        send(self, content)
        time.sleep(len(content) / BYTES_PER_SECOND)

    def receive_slowly(self, target):
        receive(self, target)
        time.sleep(len(target) / BYTES_PER_SECOND)

    connection._send_all, connection._receive_into = send_slowly, receive_slowly


after_import("spotune_trainer.checkpoint.memory.peer_connection", throttle)
"""


@pytest.fixture
def cluster(runs: Runs, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Ray of three nodes with a slot each, of which n3 is throttled."""
    (tmp_path / "sitecustomize.py").write_text(THROTTLE)
    with pytest.MonkeyPatch.context() as patch:
        paths = (str(tmp_path), str(Path(injected.__file__).parent), os.environ.get("PYTHONPATH", ""))
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
        patch.setenv("SPOTUNE_NODE", "n1")
        with started_cluster(runs, tmp_path_factory.mktemp("ray"), 1, 1, 1) as cluster:
            yield cluster


def test_throttled_node_is_left_out_and_the_model_is_the_same(cluster: Cluster) -> None:
    directory, undisturbed = JobDirectory(cluster.directory), cluster.runs.empty("undisturbed")
    files.write_json(directory.job, {"spec": {"workers": {"nodeCheck": "always"}}})
    until(lambda: cluster.agents.ensure(gpus=False) == Slots(2, 2, 2) and cluster.agents.unfit_nodes())
    (unfit,) = cluster.agents.unfit_nodes()
    assert unfit["node"] == "n3"
    assert re.fullmatch(r"its network carries \d+ MB/s; the median of 3 nodes is [\d,]+ MB/s", unfit["reason"]), unfit[
        "reason"
    ]
    checked = {event["node"]: event for event in Ledger(directory).records("node-checked")}
    rates = [rate for event in checked.values() for key, rate in event["bytesPerSecond"].items()]
    assert sorted(checked) == ["n1", "n2", "n3"]
    assert len(rates) == 3, "all pairs are known"
    assert sorted(rates)[1] < 12e6, "both connections of the bad node"

    job = cluster.runs.job(training={"epochs": EPOCHS}, workers={"count": 3, "min": 2, "gpus": 0})
    trained = cluster.runs.empty("throttled")
    assert isinstance(cluster.agents.run_group(next_task(trained, job), 2), Trained)
    assert cluster.agents.ensure(gpus=False).nodes == 2, "the bad node stays out"
    train_generation(undisturbed, job, LAYOUT)
    assert sample_hashes(trained) == sample_hashes(undisturbed)
    steps = EPOCHS * STEPS_PER_EPOCH
    found, expected = committed_state(trained, steps), committed_state(undisturbed, steps)
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []
