"""Measures what it costs the training steps that a node copies a commit to another node, and receives a third one's.

Worker groups of two CPU ranks train a Llama of random weights. They take turns: in some, a thread of the same process
sends 256 MB again and again to another process, at most at a given rate, as `checkpoint.peerCopyRate` sets it. So this
machine sends and receives, as each node of a ring does, and both of its ends use the processor that the ranks need. The
way is the loopback interface: a network is not measured.

Besides the time of the steps, which other work on the machine disturbs, the result has the processor time of both
threads for each gigabyte.

    python -m benchmarks.peer_copy --output benchmarks/results/peer_copy.json
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import xxhash

from benchmarks.machine import describe_machine
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import latest_generation
from spotune_trainer.checkpoint.memory.peer_connection import PeerAddress
from spotune_trainer.checkpoint.memory.peer_sender import PeerSender
from spotune_trainer.checkpoint.memory.peer_server import lower_priority
from spotune_trainer.checkpoint.memory.segment import LABEL_BYTES, Label
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.measured import LLAMAS, make_llama_job, publish
from tests.trainer.support.peers import SECRET, Node
from tests.trainer.support.runs import Layout, train_generation

LAYOUT = Layout(2, 2)
STEPS, LEFT_OUT = 24, 4
"""Steps of a group, and how many of its first ones are not counted."""
COPY_BYTES = 256_000_000
RATES = (0, 200, 1000)
"""Megabytes per second; 0: nothing is copied."""
MODEL = LLAMAS["small"]


@dataclass
class Copying:
    """A thread that sends the same commit again and again.

    Attributes:
        copied_bytes: by finished copies.
        seconds: that they took.
        processor_seconds: of the thread.
    """

    node: Node
    peer: PeerAddress
    copied_bytes: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0
    _stopped: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def at(self, megabytes_per_second: int) -> Iterator[None]:
        """Copy meanwhile."""
        if not megabytes_per_second:
            yield
            return
        self._stopped.clear()
        thread = threading.Thread(target=self._run, args=(megabytes_per_second * 1e6,))
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join()

    def _run(self, bytes_per_second: float) -> None:
        lower_priority()
        began = time.thread_time()
        while not self._stopped.is_set():
            sender = PeerSender(self.node.memory, 1, _any_of, self.peer, SECRET, bytes_per_second)
            started = time.monotonic()
            assert sender.send_newest()
            self.seconds += time.monotonic() - started
            self.copied_bytes += COPY_BYTES
        self.processor_seconds += time.thread_time() - began


def _any_of(names: Collection[str]) -> str | None:
    return next(iter(names), None)


def measure(root: Path, rounds: int) -> dict[str, Any]:
    """Seconds of the steps by rate, and what the copies took."""
    LLAMAS["measured"] = MODEL
    training = {"maxSteps": STEPS}
    sections = {"workers": {"count": 2, "gpus": 0}, "training": training}
    job = make_llama_job(root, "measured", batch=4, length=128, sections=sections, keep=1, every=10 * STEPS)
    seconds: dict[int, list[float]] = {rate: [] for rate in RATES}
    node = Node()
    fill(node)
    with started_peer() as (peer, connection):
        copies = {rate: Copying(node, peer) for rate in RATES}
        for number in range(rounds * len(RATES)):
            rate = RATES[number % len(RATES)]
            directory = JobDirectory(root / f"job-{number}")
            directory.root.mkdir()
            with copies[rate].at(rate):
                train_generation(directory, job, LAYOUT, micro_batch_size=2, timeout=600)
            logs = directory.generation_logs(latest_generation(directory))
            steps = [line["productiveSeconds"] for line in files.read_lines(logs.steps)][LEFT_OUT:]
            seconds[rate].append(statistics.median(steps))
            print(rate, round(seconds[rate][-1], 4), flush=True)
        connection.send(None)
        received = connection.recv()
    node.lose()
    undisturbed = statistics.median(seconds[0])
    copied = sum(each.copied_bytes for each in copies.values())
    return {
        "stepSeconds": {str(rate): [round(each, 4) for each in found] for rate, found in seconds.items()},
        "slowdown": {
            str(rate): round(statistics.median(found) / undisturbed - 1, 4) for rate, found in seconds.items() if rate
        },
        "copiedMegabytesPerSecond": {
            str(rate): round(each.copied_bytes / each.seconds / 1e6, 1) for rate, each in copies.items() if rate
        },
        "processorSecondsPerGigabyte": {
            "sender": round(sum(each.processor_seconds for each in copies.values()) / copied * 1e9, 3),
            "receiver": round(received / copied * 1e9, 3),
        },
    }


def fill(node: Node) -> None:
    """Let a node have a commit of one rank in memory."""
    (memory,) = node.begin(1)
    segment = memory.begin(COPY_BYTES)
    with memoryview(segment.map()) as mapped, mapped[LABEL_BYTES:] as content:
        torch.frombuffer(content, dtype=torch.uint8).random_()
        checksum = xxhash.xxh3_64(content).hexdigest()
    memory.complete(segment, Label("step-00000001.gen-1", "rank-00000.safetensors", COPY_BYTES, checksum))


@contextmanager
def started_peer() -> Iterator[tuple[PeerAddress, Connection]]:
    """Another process that keeps copies. It replies to a message with the processor seconds of its threads."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=keep_copies, args=(theirs,))
    process.start()
    yield ours.recv(), ours
    process.join()


def keep_copies(connection: Connection) -> None:
    """Main function of that process."""
    node = Node()
    node.begin(1)
    began = time.process_time()
    connection.send(node.server.address)
    connection.recv()
    connection.send(time.process_time() - began)
    node.lose()


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="groups at each rate")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder), options.rounds)
    machine = describe_machine("torch", "deepspeed", "transformers")
    publish({"machine": machine, **measured}, options.output)


if __name__ == "__main__":
    main()
