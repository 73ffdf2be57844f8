"""The driver's side of the node check: which nodes it has to check, which it may use, and which it leaves out.

A node is checked once after each of its boots: results are in the ledger, so neither another group nor another driver
checks it again, unless a rank there fails with an error of hardware. All nodes are checked at the same time, while
their agents import modules and the driver plans:

    agent started -> its own devices -> connections to up to two nodes that have passed -> ready, or left out

The first three nodes measure their connections one after the other, so that of three nodes all pairs are known.

Must be cheap to import: the driver starts the agents before its own imports.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import ray
from ray.exceptions import RayError, RayTaskError

from spotune_trainer import files
from spotune_trainer.checkpoint.memory.peer_connection import PeerAddress
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.training.task import RankResult
from spotune_trainer.worker_group.fitness.measurements import NodeMeasurement, NodeRecord, key_of
from spotune_trainer.worker_group.fitness.verdict import of_interest, unfit_nodes

logger = logging.getLogger("spotune.driver")

_PEERS: Final = 2
_ALL_PAIRS: Final = 3
"""Of so many nodes all connections are measured."""
_UNKNOWN: Final = NodeMeasurement()


class Node(Protocol):
    """What an agent tells about its node: see `node_state.NodeInfo`."""

    @property
    def name(self) -> str:
        """For people and Kubernetes."""

    @property
    def boot(self) -> str:
        """Id that its kernel made when it started."""

    @property
    def is_of_cluster(self) -> bool:
        """Whether Kubernetes has placed the agent there."""

    @property
    def peer(self) -> PeerAddress | None:
        """Where other agents reach it."""


@dataclass
class _Check:
    """The check of the node of an agent.

    Attributes:
        call: calls a method of the agent; returns a reference of Ray's to the result.
        info_ref: result of `NodeAgent.info`.
        gpus: whether its ranks train on GPUs.
        info: that result; None before.
        measuring: result of `NodeAgent.measure`; None before, and of nodes that are not checked.
        linking: keys of the nodes that it pulls bytes from, and the result; None before.
        record: what was measured.
        is_done: whether the node may be used, unless it is unfit.
    """

    call: Callable[..., Any]
    info_ref: Any
    gpus: bool
    info: Node | None = None
    measuring: Any = None
    linking: tuple[list[str], Any] | None = None
    record: NodeRecord | None = None
    is_done: bool = False

    @property
    def key(self) -> str:
        """Of the node and its boot; empty before they are known."""
        return key_of(self.info.name, self.info.boot) if self.info is not None else ""


class NodeFitness:
    """Checks nodes, and remembers the results. Thread-safe.

    Args:
        directory: of the job.
    """

    def __init__(self, directory: JobDirectory) -> None:
        self._directory = directory
        self._ledger = Ledger(directory)
        self._lock = threading.RLock()
        self._checks: dict[str, _Check] = {}
        self._checked: dict[str, None] = {}
        self._keys: dict[str, str] = {}
        self._is_comparison_due = False
        checked = (NodeRecord.from_json(event) for event in self._ledger.records("node-checked"))
        self._records = {record.key: record for record in checked}
        left_out = self._ledger.records("node-unfit")
        self._unfit = {key_of(event["node"], event["boot"]): event for event in left_out}

    def begin(self, node: str, call: Callable[..., Any], info_ref: Any, *, gpus: bool) -> None:
        """An agent has been started.

        Args:
            node: Ray's id of its node.
            call: calls a method of the agent; returns a reference of Ray's to the result.
            info_ref: result of `NodeAgent.info`.
            gpus: whether its ranks train on GPUs.
        """
        with self._lock:
            self._checks[node] = _Check(call, info_ref, gpus)

    def forget(self, node: str) -> None:
        """The agent of a node has ended. What is known of the node stays."""
        with self._lock:
            self._checks.pop(node, None)
            self._checked.pop(node, None)

    def advance(self) -> None:
        """Go on with the checks of all nodes, and compare those that have ended with all others, once for all."""
        with self._lock:
            for node, check in list(self._checks.items()):
                self._advance_as_far_as_possible(node, check)
            if self._is_comparison_due:
                self._is_comparison_due = False
                self._compare()

    def is_ready(self, node: str) -> bool:
        """Whether the node has been checked and is fit, as of the last call of `advance`."""
        with self._lock:
            check = self._checks.get(node)
            return check is not None and check.is_done and check.key not in self._unfit

    def excluded(self) -> set[str]:
        """Ray's ids of nodes that are not to be used."""
        with self._lock:
            return {node for node, key in self._keys.items() if key in self._unfit}

    def unfit_nodes(self) -> list[dict[str, Any]]:
        """The nodes that are left out, as in the status: of each name, the last boot."""
        with self._lock:
            if not self._unfit:
                return []
            of_name = {event["node"]: event for event in self._unfit.values()}
            passed = {record.node: record.key for record in self._records.values()}
        return [
            {"node": name, "boot": event["boot"], "reason": event["reason"], "since": event["time"]}
            for name, event in of_name.items()
            if passed.get(name, key_of(name, event["boot"])) == key_of(name, event["boot"])
        ]

    def name_of(self, node: str) -> str:
        """Name of the node with this id of Ray's; empty before it is known."""
        with self._lock:
            check = self._checks.get(node)
            return check.info.name if check is not None and check.info is not None else ""

    def is_same_node(self, node: str, other: str) -> bool:
        """Whether two of Ray's nodes are pods of one node: what leaves out one of them leaves out both."""
        with self._lock:
            return node == other or (node in self._keys and self._keys[node] == self._keys.get(other))

    def check_again(self, node: str, results: Iterable[RankResult]) -> None:
        """Check a node once more before its next use, if one of its ranks has failed with an error of hardware.

        Args:
            node: Ray's id of it.
            results: of its ranks, none of which runs any more.
        """
        if not any(result.failure and result.failure.is_of_hardware for result in results):
            return
        with self._lock:
            check = self._checks.get(node)
            if check is not None and check.key not in self._unfit:
                self._checks[node] = _Check(check.call, check.info_ref, check.gpus)
                self._checked.pop(node, None)
                self._records.pop(check.key, None)

    def leave_out(self, node: str, reason: str) -> None:
        """Leave out a node until its next boot.

        Args:
            node: Ray's id of it.
            reason: for people.
        """
        with self._lock:
            check = self._checks[node]
            if check.info is None:
                check.info = ray.get(check.info_ref)
                self._keys[node] = check.key
            self._record_unfit(check.info.name, check.info.boot, reason)

    def _advance_as_far_as_possible(self, node: str, check: _Check) -> None:
        try:
            while not check.is_done and self._advance(node, check):
                pass
        except RayTaskError as error:
            logger.warning("a node could not be checked, and is used: %s", error.cause)
            self._set_checked(node, check)
        except RayError:  # the agent is dead, which its pool notices
            pass

    def _advance(self, node: str, check: _Check) -> bool:
        """Take the next step of a check if it is due; returns whether there may be another one."""
        if check.info is None:
            if not _has_resolved(check.info_ref):
                return False
            check.info = ray.get(check.info_ref)
            self._keys[node] = check.key
            if check.key in self._records or check.key in self._unfit or not self._is_due(check):
                self._set_checked(node, check)
                return False
            check.measuring = check.call("measure", check.gpus)
        if check.record is None:
            return self._receive(node, check)
        if check.linking is None:
            return self._begin_links(node, check, check.record)
        keys, rates = check.linking
        if not _has_resolved(rates):
            return False
        found = zip(keys, ray.get(rates), strict=True)
        self._finish(node, check, replace(check.record, links={key: rate for key, rate in found if rate is not None}))
        return False

    def _receive(self, node: str, check: _Check) -> bool:
        """Take the measurement of the node's devices; returns whether its connections are next."""
        if not _has_resolved(check.measuring):
            return False
        measured: NodeMeasurement | None = ray.get(check.measuring)
        if measured is None:  # ranks of an earlier driver train there
            self._set_checked(node, check)
            return False
        assert check.info is not None, "it is asked for first"
        check.record = NodeRecord(check.info.name, check.info.boot, measured)
        if unfit_nodes([check.record]):  # no need for its connections
            self._finish(node, check, check.record)
            return False
        return True

    def _begin_links(self, node: str, check: _Check, record: NodeRecord) -> bool:
        """Begin to measure connections; returns whether there are none, so that the check has ended."""
        others = [each for name, each in self._checks.items() if name != node]
        checked = sum(each.is_done for each in others)
        if checked < _ALL_PAIRS and any(each.linking is not None and not each.is_done for each in others):
            return False
        chosen = self._peers_of(check)
        if not chosen:
            self._finish(node, check, record)
            return True
        check.linking = list(chosen), check.call("pull_rates", list(chosen.values()))
        return False

    def _peers_of(self, check: _Check) -> dict[str, PeerAddress]:
        """A few nodes that are checked and fit, by key. It looks at no others: there may be a thousand."""
        checked = list(self._checked)
        start = len(self._records) % max(1, len(checked))  # not the same ones for all
        chosen: dict[str, PeerAddress] = {}
        for node in (*checked[start:], *checked[:start]):
            info = self._checks[node].info
            if info is None or info.peer is None:
                continue
            key = key_of(info.name, info.boot)
            if key != check.key and key not in self._unfit:
                chosen[key] = info.peer
            if len(chosen) == _PEERS:
                break
        return chosen

    def _set_checked(self, node: str, check: _Check) -> None:
        check.is_done = True
        self._checked[node] = None

    def _finish(self, node: str, check: _Check, record: NodeRecord) -> None:
        check.record = record
        self._set_checked(node, check)
        self._records[record.key] = record
        self._ledger.append("node-checked", **record.as_json())
        self._is_comparison_due = True
        for reason in unfit_nodes([record]).values():  # by itself: no other node is to pull bytes from it
            self._record_unfit(record.node, record.boot, reason)

    def _compare(self) -> None:
        """Leave out the nodes that are unfit by comparison with all others."""
        present = set(self._keys.values())
        for key, reason in unfit_nodes(of_interest(self._records, present)).items():
            if key in present:
                self._record_unfit(self._records[key].node, self._records[key].boot, reason)

    def _record_unfit(self, node: str, boot: str, reason: str) -> None:
        key = key_of(node, boot)
        if key in self._unfit:
            return
        event = {"time": time.time(), "event": "node-unfit", "node": node, "boot": boot, "reason": reason}
        self._unfit[key] = event
        self._ledger.append_record(event)
        logger.warning("node %s is unfit and is left out: %s", node, reason)

    def _is_due(self, check: _Check) -> bool:
        """Whether a node is to be checked. Reads plain JSON: the job's model takes long to import.

        By default not on a machine without Kubernetes: other programs may need the memory that the check fills.
        """
        job: Mapping[str, Any] = files.read_json(self._directory.job) or {}
        setting = job.get("spec", {}).get("workers", {}).get("nodeCheck", "auto")
        has_own_gpus = check.gpus and check.info is not None and check.info.is_of_cluster
        return bool(setting == "always" or (setting == "auto" and has_own_gpus))


def _has_resolved(reference: Any) -> bool:
    return bool(ray.wait([reference], timeout=0)[0])


def left_out(nodes: Sequence[Mapping[str, Any]]) -> str:
    """The nodes that are left out, for a message; empty without any."""
    return "; ".join(f"node {node['node']} is unfit and is left out: {node['reason']}" for node in nodes)
