"""Requests per second and waiting times of `spotune serve` on processors, under the load of locust.

Usage (locust is no dependency of spotune, and its packages must not replace those of spotune):
    uv pip install --target FOLDER locust
    python -m benchmarks.serving_load --locust FOLDER --output benchmarks/results/serving_load.json

A Llama of a few thousand random parameters in fp32: nothing is downloaded, and the engine's own work is small beside
that of gateway, Ray and locust, which runs on the same machine. 1, 8 and 32 users each read one streamed answer of 32
tokens after the other, without a pause: first from one replica, then from two. Answers count if they end within some
seconds from the first question on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.provenance import commit, machine
from tests.serve.support.exported import export_tiny_model
from tests.serve.support.live_service import LiveService

_USERS = (1, 8, 32)
_REPLICAS = (1, 2)
_MARGIN_SECONDS = 3
"""How much longer locust runs: it ends running requests, up to a second early."""
_USER_FILE = Path(__file__).with_name("serving_load_users.py")


def load(service: LiveService, users: int, seconds: float, locust: Path) -> dict[str, Any]:
    """Let users read answers for some seconds.

    Args:
        service: what they ask.
        users: how many at once.
        seconds: how long.
        locust: folder with the packages of locust.
    """
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "answers.json"
        command = [sys.executable, "-m", "locust", "--locustfile", str(_USER_FILE), "--headless", "--only-summary"]
        command += ["--host", service.url, "--users", str(users), "--spawn-rate", str(users)]
        variables = {
            "PYTHONPATH": str(locust),
            "SERVING_LOAD_MODEL": str(service.ready["model"]),
            "SERVING_LOAD_OUTPUT": str(output),
        }
        subprocess.run(
            [*command, "--run-time", f"{seconds + _MARGIN_SECONDS:.0f}s"],
            env=os.environ | variables,
            capture_output=True,
            check=True,
        )
        found = json.loads(output.read_text())
    end = min((answer["asked"] for answer in found["answers"]), default=0.0) + seconds
    answers = [answer for answer in found["answers"] if answer["last"] <= end]
    return {
        "answers": len(answers),
        "failures": found["failures"],
        "requestsPerSecond": round(len(answers) / seconds, 2),
        "secondsToFirstToken": _percentiles([answer["first"] - answer["asked"] for answer in answers]),
        "secondsToLastToken": _percentiles([answer["last"] - answer["asked"] for answer in answers]),
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return {"p50": round(cuts[9], 4), "p95": round(cuts[18], 4)}


def main() -> None:
    """Measure all numbers of replicas and users, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--locust", type=Path, required=True, help="folder with the packages of locust")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each level of load")
    options = parser.parse_args()
    result: dict[str, Any] = {"commit": commit(), "machine": machine(), "seconds": options.seconds, "levels": {}}
    with tempfile.TemporaryDirectory() as name:
        model = export_tiny_model(Path(name) / "model", "causal")
        for replicas in _REPLICAS:
            with LiveService(model, "--replicas", str(replicas)) as service:
                load(service, max(_USERS), 2, options.locust)  # each replica's first use
                for users in _USERS:
                    before = os.getloadavg()[0]
                    found = load(service, users, options.seconds, options.locust)
                    level = {**found, "loadAverageBefore": round(before, 1)}
                    result["levels"][f"replicas: {replicas}, users: {users}"] = level
                    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
