"""A driver that trains nothing, for tests of the supervisor: it publishes a status and reacts to notices.

`behaviour.json` of the job directory configures it: `steps` is the number of steps. Attempts in `hang_in` stop their
heartbeat, and attempts in `fail_in` end with `exit_code` and `message`. `connect` connects to Ray before the first
step, and `hang_timeout` belongs to the retry policy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger

_STEP_SECONDS = 0.05


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    options = parser.parse_args()
    directory = JobDirectory(options.directory)
    behaviour = json.loads((directory.root / "behaviour.json").read_text())
    message = _cluster() if behaviour.get("connect") else None
    earlier = files.read_json(directory.status) or {}
    first = earlier.get("step") or 0
    for step in range(first + 1, behaviour["steps"] + 1):
        _publish(directory, options.attempt, step, behaviour["steps"], message)
        if options.attempt in behaviour.get("hang_in", ()):
            time.sleep(1000)
        if options.attempt in behaviour.get("fail_in", ()):
            sys.stdout.write(behaviour["message"] + "\n")
            return int(behaviour["exit_code"])
        notice = files.read_json(directory.notice)
        if notice is not None and notice["stop"]:
            Ledger(directory).append("notice", generation=1, step=step)
            return 10
        time.sleep(_STEP_SECONDS)
    files.write_json(directory.result, {"steps": behaviour["steps"]})
    return 0


def _publish(directory: JobDirectory, attempt: int, step: int, total: int, message: str | None) -> None:
    status: dict[str, Any] = {
        "time": time.time(),
        "heartbeat": step,
        "phase": "Training",
        "generation": 1,
        "attempt": attempt,
        "step": step,
        "totalSteps": total,
        "message": message,
        "pid": os.getpid(),
    }
    files.write_json(directory.status, status, durable=False)


def _cluster() -> str:
    """The capacity of the Ray cluster that this process is connected to."""
    import ray

    ray.init(address="auto", log_to_driver=False)
    return f"{ray.cluster_resources()['CPU']:.0f} slots"


if __name__ == "__main__":
    sys.exit(main())
