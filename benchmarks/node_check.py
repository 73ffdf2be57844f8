"""What the node check finds on this machine and how long it takes, and what timing collectives costs a step.

    python -m benchmarks.node_check                 # the processor
    python -m benchmarks.node_check --gpus          # each GPU, as on a worker node; repeat it to see the spread
    python -m benchmarks.node_check --gpus --repeat 5

Prints JSON: the devices of each repetition with their TFLOP/s and checked bytes, and the processor time of one timed
wait for a collective. With --gpus also that of a wait whose stream is timed by CUDA events.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict

import torch

from benchmarks.machine import describe_machine
from spotune_trainer.observability.own_time import CollectiveWaits
from spotune_trainer.worker_group.fitness.measure import measure, measure_in_process
from spotune_trainer.worker_group.rank_process import FORKING

_WAITS = 100_000


def seconds_of_a_wait(waits: CollectiveWaits, wait: Callable[[], None]) -> float:
    """Processor seconds that timing adds to a wait."""

    def spent(call: Callable[[], object]) -> float:
        began = time.process_time()
        for _ in range(_WAITS):
            call()
        return (time.process_time() - began) / _WAITS

    waits.begin()
    timed = spent(lambda: waits.timed(wait))
    waits.end()
    return timed - spent(wait)


def main() -> None:
    """Run the checks, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", action="store_true", help="check the GPUs, in processes of their own")
    parser.add_argument("--repeat", type=int, default=3, help="how often")
    options = parser.parse_args()
    # The first process waits for the imports of the fork server; later ones are what a node pays.
    found = [measure_in_process(FORKING, True) if options.gpus else measure(False) for _ in range(options.repeat)]
    costs = {"hostSeconds": seconds_of_a_wait(CollectiveWaits(), lambda: None)}
    if options.gpus:
        torch.zeros(1, device="cuda")  # from now on streams are timed
        costs["streamSeconds"] = seconds_of_a_wait(CollectiveWaits(), lambda: None)
    print(
        json.dumps({"machine": describe_machine(), "checks": [asdict(each) for each in found], "wait": costs}, indent=1)
    )


if __name__ == "__main__":
    main()
