"""Our endpoint against bare `vllm serve`: throughput and latency of Llama 8B on one GPU, in turns.

Usage, where vllm==0.24.0 and Ray Serve are installed (`benchmarks/gpu_pack_serving.sh`):
    python -m benchmarks.serving_speed start                   both servers beside each other on one GPU
    python -m benchmarks.serving_speed load --output X.json    the load on them, in turns
    python -m benchmarks.serving_speed stop

Both servers have the same wheel, model, share of the GPU, batch size, sequence length and environment. The weights
are dummies: vLLM fills them with random numbers. Bare vLLM has one API process, and ours has one gateway, or as many
as `start --gateways N` says, as those of `spotune serve --gateways N`. Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (64
characters). The load is vLLM's own `vllm bench
serve`, unchanged: some fixed number of requests at once, each with a prompt of 219 tokens and an answer of 195 tokens
(the means of ShareGPT), streamed by `/v1/completions`. Every measurement has new prompts, the same for both servers.
The result has the median, the lowest and the highest value of all runs, and the ratio of our median to bare vLLM's.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.serving_speed_model import MAX_LENGTH, write_model
from tests.provenance import commit

PROMPT_TOKENS, NEW_TOKENS = 219, 195
REQUESTS = {1: 16, 32: 128, 256: 768}
"""Requests of a measurement, by the number of requests at once."""
WARM_UP = {1: 3, 32: 64, 256: 512}
RUNS, BATCH, MEMORY = 5, 256, 0.42
NAME = "speed"
READY_SECONDS = 420.0
LOG_CHARACTERS = 6000
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""What our engine sets for vLLM, for both servers."""
METRICS = (
    "request_throughput",
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "p99_itl_ms",
    "completed",
    "server_cpu_ms_per_token",
)


@dataclass(frozen=True)
class Server:
    """A server process.

    Attributes:
        name: in the results.
        port: of its API.
        command: what starts it.
        health: path that has status 200 once requests are answered.
    """

    name: str
    port: int
    command: tuple[str, ...]
    health: str

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"


def servers(work: Path, *, scripted: bool, gateways: int) -> list[Server]:
    """Bare vLLM and our endpoint; or, without a GPU, our endpoint alone with a scripted engine."""
    model = str(work / "model")
    ours = (
        "-m", "benchmarks.serving_speed_ours", "--model", model, "--port", "8101", "--memory", str(MEMORY),
        "--gateways", str(gateways),
    )  # fmt: skip
    if scripted:
        return [Server("ours", 8101, (sys.executable, *ours, "--engine", "scripted"), "/healthz")]
    bare = (
        "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", NAME,
        "--host", "127.0.0.1", "--port", "8102", "--load-format", "dummy", "--generation-config", "vllm",
        "--max-model-len", str(MAX_LENGTH),
        "--max-num-seqs", str(BATCH), "--gpu-memory-utilization", str(MEMORY), "--max-logprobs", "20",
        "--disable-log-stats", "--disable-uvicorn-access-log",
    )  # fmt: skip
    return [
        Server("bare", 8102, (sys.executable, *bare), "/v1/models"),
        Server("ours", 8101, (sys.executable, *ours, "--batch", str(BATCH)), "/healthz"),
    ]


def start(work: Path, found: Sequence[Server]) -> None:
    """Start the servers one after the other: vLLM measures free memory while it starts.

    Each has a session of its own and outlives this process. Servers that already answer are left alone.
    """
    write_model(work / "model")
    for server in found:
        if answers(server):
            continue
        log, began = work / f"{server.name}.log", time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(
                server.command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=os.environ | ENVIRONMENT, start_new_session=True,
            )  # fmt: skip
        (work / f"{server.name}.pid").write_text(str(process.pid))
        while not answers(server):
            if process.poll() is not None or time.monotonic() - began > READY_SECONDS:
                print(logs(work, server))
                raise SystemExit(f"{server.name} did not start; exit code {process.poll()}")
            time.sleep(1)
        print(f"{server.name} answers after {time.monotonic() - began:.0f} s", flush=True)


def answers(server: Server) -> bool:
    """Whether a server is ready."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}{server.health}", timeout=5) as response:
        return bool(response.status == 200)
    return False


def logs(work: Path, server: Server) -> str:
    """The last lines that a server wrote, and those of Ray's workers."""
    paths = [work / f"{server.name}.log"]
    if server.name == "ours":
        folders = sorted(Path(tempfile.gettempdir()).glob("spotune-serve-*"), key=lambda path: path.stat().st_mtime)
        paths += [path for folder in folders[-1:] for path in folder.glob("ray/session_2*/logs/worker-*.err")]
        paths += [path for folder in folders[-1:] for path in folder.glob("ray/session_2*/logs/serve/replica*.log")]
    texts = [(path, path.read_text(errors="replace")) for path in paths if path.exists()]
    return "\n".join(f"--- {path}\n{text[-LOG_CHARACTERS:]}" for path, text in texts if text.strip())


def load(work: Path, found: Sequence[Server], runs: int, output: Path, levels: Sequence[int]) -> None:
    """Measure the servers in turns and write all results after each measurement."""
    values: dict[tuple[str, int], list[dict[str, float]]] = {}
    processors: dict[str, dict[str, float]] = {}
    gateways = gateways_of(work)
    for server in found:
        for level in levels:
            measure(work, server, level, WARM_UP[level], seed=10_000 + level)
        print(f"warm: {server.name}", flush=True)
    for run in range(runs):
        for level in levels:
            for server in found[:: 1 if run % 2 else -1]:
                before = processor_seconds(work, server)
                result = measure(work, server, level, REQUESTS[level], seed=1000 * run + level)
                used = difference(processor_seconds(work, server), before)
                tokens = result["completed"] * NEW_TOKENS
                result["server_cpu_ms_per_token"] = 1000 * sum(used.values()) / max(tokens, 1)
                processors[f"{server.name}, {level} at once"] = {
                    name: round(1e6 * seconds / max(tokens, 1), 1) for name, seconds in used.items() if seconds > 0.05
                }
                values.setdefault((server.name, level), []).append(result)
                short = {name: round(result[name], 2) for name in METRICS}
                print(run, level, server.name, json.dumps(short), flush=True)
                report(output, values, processors, gateways)


def measure(work: Path, server: Server, level: int, count: int, seed: int) -> dict[str, float]:
    """One run of `vllm bench serve`."""
    import uvloop
    from vllm.benchmarks.serve import add_cli_args, main_async

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    arguments = parser.parse_args([
        "--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions", "--model", NAME,
        "--tokenizer", str(work / "model"), "--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS),
        "--random-output-len", str(NEW_TOKENS), "--ignore-eos", "--num-prompts", str(count), "--max-concurrency",
        str(level), "--seed", str(seed), "--temperature", "0", "--disable-tqdm", "--ready-check-timeout-sec", "0",
        "--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99",
    ])  # fmt: skip
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            result: dict[str, Any] = uvloop.run(main_async(arguments))
    except BaseException:
        print(text.getvalue()[-LOG_CHARACTERS:], logs(work, server), sep="\n")
        raise
    if result["completed"] < count:
        print(text.getvalue()[-LOG_CHARACTERS:], logs(work, server), sep="\n", flush=True)
    return {name: float(result[name]) for name in METRICS if name in result}


def processor_seconds(work: Path, server: Server) -> dict[str, float]:
    """Processor seconds so far of a server's processes, by their names."""
    import psutil  # type: ignore[import-untyped]

    root = psutil.Process(int((work / f"{server.name}.pid").read_text()))
    found: dict[str, float] = {}
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.Error, IndexError):
            line, times = process.cmdline(), process.cpu_times()
            name = next((part for part in line if part in {"-m", "-c"}), "") + " " + Path(line[0]).name[:60]
            found[f"{name.strip()} {process.pid}"] = times.user + times.system
    return found


def difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """What was used in between."""
    return {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}


def gateways_of(work: Path) -> int:
    """How many gateways our endpoint was started with."""
    command = Path(f"/proc/{(work / 'ours.pid').read_text()}/cmdline").read_bytes().decode().split("\0")
    return int(command[command.index("--gateways") + 1])


def report(
    output: Path,
    values: dict[tuple[str, int], list[dict[str, float]]],
    processors: dict[str, dict[str, float]],
    gateways: int,
) -> None:
    """Write what was measured so far."""
    table: dict[str, Any] = {}
    for (name, level), results in values.items():
        table.setdefault(f"{level} at once", {})[name] = {
            metric: {
                "median": round(statistics.median(result[metric] for result in results), 3),
                "lowest": round(min(result[metric] for result in results), 3),
                "highest": round(max(result[metric] for result in results), 3),
                "runs": [round(result[metric], 3) for result in results],
            }
            for metric in METRICS
        }
    for row in table.values():
        if {"bare", "ours"} <= set(row):
            row["ours / bare"] = {
                metric: round(row["ours"][metric]["median"] / row["bare"][metric]["median"], 4)
                for metric in METRICS
                if row["bare"][metric]["median"]
            }
            row["ours - bare, ms to the first token"] = round(
                row["ours"]["median_ttft_ms"]["median"] - row["bare"]["median_ttft_ms"]["median"], 3
            )
    found = {
        "commit": commit(),
        "device": device(),
        "processors": os.cpu_count(),
        "versions": {name: version(name) for name in ("vllm", "ray", "torch", "transformers")},
        "our gateways": gateways,
        "prompt + answer tokens": [PROMPT_TOKENS, NEW_TOKENS],
        "results": table,
        "processor microseconds per token in the last run": processors,
    }
    output.write_text(json.dumps(found, indent=1) + "\n")


def device() -> str:
    """Name of the GPU."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
    return "no GPU"


def stop(work: Path, found: Sequence[Server]) -> None:
    """End the servers."""
    for server in found:
        path = work / f"{server.name}.pid"
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(path.read_text()), signal.SIGTERM)
            path.unlink()


def main() -> None:
    """Start, measure or stop the servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("start", "load", "stop"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "serving-speed")
    parser.add_argument("--output", type=Path, default=Path("serving_speed.json"))
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--levels", type=int, nargs="+", choices=sorted(REQUESTS), default=list(REQUESTS))
    parser.add_argument("--gateways", type=int, default=1, help="With start: our gateway processes, all on one port.")
    parser.add_argument("--scripted", action="store_true", help="Without a GPU: our endpoint with a scripted engine.")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    found = servers(options.work, scripted=options.scripted, gateways=options.gateways)
    if options.action == "start":
        start(options.work, found)
    elif options.action == "load":
        load(options.work, found, options.runs, options.output, options.levels)
    else:
        stop(options.work, found)


if __name__ == "__main__":
    main()
