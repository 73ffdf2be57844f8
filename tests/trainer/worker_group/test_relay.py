"""What ranks on a node with a directory of its own log, as the driver sees it, and the driver's notices there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spotune_trainer import files
from spotune_trainer.bucket.link import Link, link_node, link_of, put_link
from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.files import LineReader
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.notice import NoticeWatch, write_notice
from spotune_trainer.worker_group import relay
from spotune_trainer.worker_group.relay import Notices, Relay, exchange


@dataclass
class Machine:
    """A node without a network between it and the driver.

    Attributes:
        directory: of the node.
        is_lost: whether it does not answer.
    """

    directory: JobDirectory
    is_lost: bool = False

    def exchange(self, generation: int, notices: Notices, known: Mapping[str, int]) -> Callable[[], Any]:
        def answer() -> Any:
            if self.is_lost:
                raise RuntimeError("the actor has died")
            return exchange(self.directory, generation, notices, known)

        return answer


@dataclass
class Scene:
    """A head and two nodes, in generation 1; rank 0 is on the first node."""

    head: JobDirectory
    nodes: list[Machine]
    relay: Relay

    def log(self, rank: int, text: str) -> None:
        logs = self.nodes[rank].directory.generation_logs(1)
        logs.root.mkdir(parents=True, exist_ok=True)
        with logs.worker(rank).open("a") as stream:
            stream.write(text)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    head = JobDirectory(tmp_path / "head")
    claim(head, None)
    nodes = [Machine(JobDirectory(tmp_path / name)) for name in ("n1", "n2")]
    return Scene(head, nodes, Relay(head, lambda: nodes))


def test_driver_reads_what_ranks_on_several_nodes_have_logged(scene: Scene) -> None:
    logs = scene.nodes[0].directory.generation_logs(1)
    logs.root.mkdir(parents=True)
    steps = LineReader(scene.head.generation_logs(1).steps)
    for step in (1, 2, 3):
        files.append_json(logs.steps, {"step": step})
        files.write_json(logs.progress, {"heartbeat": step})
        scene.log(0, f"step {step}\n")
        scene.log(1, f"step {step} too\n")
        scene.relay.pull()
        assert [record["step"] for record in steps.read()] == [step]
        assert (files.read_json(scene.head.generation_logs(1).progress) or {})["heartbeat"] == step
    assert scene.head.generation_logs(1).worker(1).read_text() == "step 1 too\nstep 2 too\nstep 3 too\n"
    assert (scene.head.generation_logs(1).worker(0)).read_text() == "step 1\nstep 2\nstep 3\n"


def test_log_of_many_parts_arrives_whole(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_PART_BYTES", 7)
    text = "".join(f"line {number}\n" for number in range(20))
    scene.log(1, text)
    scene.relay.pull()
    assert scene.head.generation_logs(1).worker(1).read_text() == text


def test_next_head_continues_the_logs_that_it_has_from_the_bucket(scene: Scene) -> None:
    scene.log(0, "from the bucket\nfrom the node\n")
    log = scene.head.generation_logs(1).worker(0)
    log.parent.mkdir(parents=True)
    log.write_text("from the ")  # as of the last upload
    scene.relay.pull()
    assert log.read_text() == "from the bucket\nfrom the node\n"


def test_lost_node_does_not_keep_the_others_from_being_read(scene: Scene) -> None:
    scene.nodes[0].is_lost = True
    scene.log(1, "alive\n")
    scene.relay.pull()
    assert scene.head.generation_logs(1).worker(1).read_text() == "alive\n"


def test_rank_reads_notices_of_driver_and_supervisor_and_no_withdrawn_one(scene: Scene) -> None:
    node = scene.nodes[0].directory
    watch = NoticeWatch([node.notice, node.generation_logs(1).notice], clock=iter(range(100)).__next__)
    write_notice(scene.head.notice, seconds=60, reason="the head is about to end")
    scene.relay.pull()
    assert watch.flags(1.0).commit
    scene.head.notice.unlink()
    scene.head.generation_logs(1).root.mkdir(parents=True, exist_ok=True)
    write_notice(scene.head.generation_logs(1).notice, seconds=None, reason="a node is draining", leave=True)
    scene.relay.pull()
    assert not node.notice.exists(), "the next group must not react to it"
    flags = watch.flags(1.0)
    assert flags.commit
    assert flags.leave


def test_notice_of_the_agent_for_its_own_ranks_stays(scene: Scene) -> None:
    logs = scene.nodes[1].directory.generation_logs(1)
    logs.root.mkdir(parents=True)
    write_notice(logs.agent_notice, seconds=None, reason="no driver", leave=True)
    scene.relay.pull()
    assert json.loads(logs.agent_notice.read_text())["reason"] == "no driver"
    assert not scene.head.generation_logs(1).agent_notice.exists(), "another node must not react to it"


def test_results_of_the_harness_come_from_the_node_of_rank_0_alone(scene: Scene) -> None:
    for number, node in enumerate(scene.nodes):
        node.directory.generation_logs(1).root.mkdir(parents=True)
        files.write_json(node.directory.harness, {"node": number})
    files.write_json(scene.nodes[0].directory.generation_logs(1).progress, {"heartbeat": 1})
    scene.relay.pull()
    assert files.read_json(scene.head.harness) == {"node": 0}


def test_directory_of_the_driver_is_not_that_of_a_node(tmp_path: Path) -> None:
    head, node = JobDirectory(tmp_path / "head"), JobDirectory(tmp_path / "node")
    put_link(head, Link("s3://bucket/job", 3))
    assert not link_node(head, "s3://bucket/job"), "spotune run: ranks and driver share it"
    assert link_of(head) == Link("s3://bucket/job", 3)
    assert link_node(node, "s3://bucket/job")
    assert link_of(node) == Link("s3://bucket/job")
    (node.root / "of-the-earlier-job").touch()
    assert link_node(node, "s3://bucket/another"), "the directory of an earlier job on a local disk"
    assert [path.name for path in node.root.iterdir()] == ["bucket.json"]
    assert link_of(node) == Link("s3://bucket/another")
