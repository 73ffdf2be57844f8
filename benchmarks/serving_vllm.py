"""The engine vllm on GPUs: continued answers, and its speed beside bare vLLM.

Usage, where vllm==0.24.0 is installed:
    python -m benchmarks.serving_vllm --output benchmarks/results/serving_vllm.json

A Llama of 1.1 billion random parameters in bfloat16, so nothing is downloaded. Each part below runs in a process of its
own, because vLLM reads its settings from the environment:

    speed                  tokens per second and time to the first token, against the same AsyncLLM alone, in turns
    plain                  answers cut at a random token and continued; checks of parameters and errors
    batch-invariant        the same answers with batch-invariant kernels, and their speed
    batch-invariant-flash  the same with FlashAttention instead of Triton's attention
    adapters               two LoRA adapters and the base model in one batch; `kill -9` of the engine's owner
    tensor-parallel        answers of two GPUs, if there are two

An answer is continued after vLLM's prefix cache was cleared, as on a replica that has never seen it. The first start of
vLLM takes two minutes, later ones less: compiled graphs are cached by the path of the model, which `--work` keeps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.serving_vllm_checks import checks, kill_engine_core
from benchmarks.serving_vllm_requests import (
    KINDS,
    NEW_TOKENS,
    PROMPT_TOKENS,
    Tokens,
    answer,
    answers,
    request,
    tokens_of,
    write_adapter,
    write_model,
)
from spotune_serve.engine.base import GenerationRequest
from spotune_serve.engine.vllm_engine import VllmEngine, start_vllm
from spotune_serve.engine.vllm_parameters import VllmSettings
from tests.provenance import commit

STREAMS, ALONE = 32, 8
BATCHES, RUNS = (1, 32, 256), 5
SETTINGS = VllmSettings(memory_fraction=0.35)
PART_SECONDS = 300.0
EXIT_SECONDS = 15.0

Generate = Callable[[GenerationRequest], AsyncIterator[int]]


class Report:
    """What a part has found so far, written after each step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Add a result."""
        self._found[name] = value
        self._path.write_text(json.dumps(self._found, indent=1) + "\n")
        print(name, json.dumps(value), flush=True)


async def forget(engine: VllmEngine) -> None:
    """Clear vLLM's prefix cache, once the last sequence has left it."""
    for _ in range(200):
        if await engine._llm.reset_prefix_cache():
            return
        await asyncio.sleep(0.01)
    raise RuntimeError("sequences have not left vLLM's cache")


async def continued(engine: VllmEngine, asked: Sequence[GenerationRequest], name: str) -> dict[str, Any]:
    """How many answers stay the same: generated again, alone, and cut at a random token and continued."""
    whole = await answers(engine, asked)
    await forget(engine)
    again = await answers(engine, asked)
    draw = random.Random(name)
    cuts = [draw.randrange(1, NEW_TOKENS) for _ in asked]
    parts = [replace(one, generated=tuple(tokens[:cut])) for one, tokens, cut in zip(asked, whole, cuts, strict=True)]
    await forget(engine)
    tails = await answers(engine, parts)
    alone, continued_alone = [], []
    for one, part in zip(asked[:ALONE], parts[:ALONE], strict=True):
        await forget(engine)
        alone.append(await answer(engine, one))
        await forget(engine)
        continued_alone.append(await answer(engine, part))
    found = {
        "generated again in the same batch": share(again, whole),
        "continued in a batch": share(tails, [tokens[cut:] for tokens, cut in zip(whole, cuts, strict=True)]),
        "generated alone": share(alone, whole[:ALONE]),
        "continued alone": share(continued_alone, [t[c:] for t, c in zip(whole[:ALONE], cuts[:ALONE], strict=True)]),
        "equal tokens after the cut until the first difference, median": statistics.median(
            equal_prefix(tail, tokens[cut:]) for tail, tokens, cut in zip(tails, whole, cuts, strict=True)
        ),
    }
    if name == "penalties":  # a control: tokens of earlier replicas that penalties do not count
        prompts = [replace(part, prompt=part.prompt + part.generated, generated=()) for part in parts]
        limited = [
            replace(p, sampling=replace(p.sampling, max_tokens=NEW_TOKENS - cut))
            for p, cut in zip(prompts, cuts, strict=True)
        ]
        wrong = await answers(engine, limited)
        found["control: tokens passed as prompt"] = share(wrong, [t[c:] for t, c in zip(whole, cuts, strict=True)])
    return found


def share(found: Sequence[Tokens], expected: Sequence[Tokens]) -> float:
    """The share of equal answers."""
    return sum(one == other for one, other in zip(found, expected, strict=True)) / len(expected)


def equal_prefix(found: Tokens, expected: Tokens) -> int:
    """How many tokens are equal before the first difference."""
    pairs = zip(found, expected, strict=True)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(expected))


async def measure(generate: Generate, batch: int, series: str) -> tuple[float, list[float]]:
    """Generated tokens per second of `batch` sampled requests at once, and milliseconds to each first token."""
    start = time.perf_counter()

    async def one(number: int) -> tuple[float, int]:
        first, count = 0.0, 0
        async for _ in generate(request(number, "sampled", series)):
            first = first or time.perf_counter() - start
            count += 1
        return first, count

    found = await asyncio.gather(*(one(number) for number in range(batch)))
    assert {count for _, count in found} == {NEW_TOKENS}
    return batch * NEW_TOKENS / (time.perf_counter() - start), [first * 1000 for first, _ in found]


async def speed(report: Report, engines: dict[str, Generate]) -> None:
    """Speed of some engines, in turns. Every measurement has new prompts, so that no prefix is cached."""
    for name, generate in engines.items():
        for batch in (*BATCHES, 1):
            await measure(generate, batch, f"warm-up of {name}")
    rates: dict[tuple[str, int], list[float]] = {}
    firsts: dict[tuple[str, int], list[float]] = {}
    for run in range(RUNS):
        for batch in BATCHES:
            for name in list(engines)[:: 1 if run % 2 else -1]:
                rate, first = await measure(engines[name], batch, f"run {run} of {name}, {batch}")
                rates.setdefault((name, batch), []).append(rate)
                firsts.setdefault((name, batch), []).extend(first)
        report.add("speed", table(rates, firsts))


def table(rates: dict[tuple[str, int], list[float]], firsts: dict[tuple[str, int], list[float]]) -> dict[str, Any]:
    """Tokens per second and milliseconds to the first token by name and batch size."""
    return {
        f"{name}, {batch} at once": {
            "tokens_per_second": [round(value) for value in spread(rates[name, batch])],
            "first_token_ms": [round(value, 1) for value in spread(firsts[name, batch])],
        }
        for name, batch in rates
    }


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, lowest and highest."""
    return statistics.median(values), min(values), max(values)


def bare_vllm(engine: VllmEngine) -> Generate:
    """The same AsyncLLM without our engine around it."""
    from vllm import SamplingParams as VllmSampling
    from vllm.sampling_params import RequestOutputKind

    llm = engine._llm

    async def generate(asked: GenerationRequest) -> AsyncIterator[int]:
        sampling = VllmSampling(
            max_tokens=asked.sampling.max_tokens, seed=asked.sampling.seed, temperature=asked.sampling.temperature,
            ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA, skip_clone=True,
        )  # fmt: skip
        prompt = {"type": "token", "prompt_token_ids": list(asked.prompt)}
        async for output in llm.generate(prompt, sampling, asked.request_id):
            for token in output.outputs[0].token_ids:
                yield token

    return generate


def timed_start(report: Report, directory: Path, adapters: dict[str, Path], settings: VllmSettings) -> VllmEngine:
    """An engine; its start is timed."""
    start = time.perf_counter()
    engine = start_vllm(directory, adapters, settings)
    report.add("start_seconds", round(time.perf_counter() - start, 1))
    return engine


async def compare_answers(report: Report, engine: VllmEngine, kinds: Sequence[str] = tuple(KINDS)) -> None:
    """Continued answers of each kind of sampling."""
    for kind in kinds:
        report.add(kind, await continued(engine, [request(number, kind) for number in range(STREAMS)], kind))


async def beside_bare(report: Report, directory: Path) -> None:
    """The part speed."""
    engine = timed_start(report, directory, {}, SETTINGS)
    await speed(report, {"engine": partial(tokens_of, engine), "bare": bare_vllm(engine)})
    await engine.close()


async def plain(report: Report, directory: Path) -> None:
    """The part plain."""
    engine = timed_start(report, directory, {}, SETTINGS)
    core = multiprocessing.active_children()[0]
    report.add("checks", await checks(engine))
    await compare_answers(report, engine)
    report.add("kill -9 of vLLM's process", await kill_engine_core(engine, core))


async def batch_invariant(report: Report, directory: Path, attention_backend: str = "") -> None:
    """The parts batch-invariant and batch-invariant-flash."""
    settings = replace(SETTINGS, batch_invariant=True, attention_backend=attention_backend)
    engine = timed_start(report, directory, {}, settings)
    await compare_answers(report, engine)
    await speed(report, {"engine": partial(tokens_of, engine)})
    await engine.close()


async def adapters(report: Report, directory: Path) -> None:
    """The part adapters."""
    folders = {name: directory.parent / name for name in ("one", "two")}
    for seed, folder in enumerate(folders.values()):
        write_adapter(folder, seed)
    engine = timed_start(report, directory, folders, replace(SETTINGS, batch_invariant=True))
    names = ("", *folders)
    same = [replace(request(0, "greedy"), adapter=name) for name in names]
    found = await answers(engine, same)
    report.add("different answers of base model and adapters", len({tuple(tokens) for tokens in found}) == 3)
    mixed = [replace(request(number, "sampled"), adapter=names[number % 3]) for number in range(STREAMS)]
    report.add("mixed batch, sampled", await continued(engine, mixed, "mixed"))
    await wait_to_be_killed(report)


async def tensor_parallel(report: Report, directory: Path) -> None:
    """The part tensor-parallel."""
    engine = timed_start(report, directory, {}, replace(SETTINGS, batch_invariant=True, tensor_parallel_size=2))
    await compare_answers(report, engine, ("greedy", "penalties"))
    await speed(report, {"engine": partial(tokens_of, engine)})
    await wait_to_be_killed(report)


async def wait_to_be_killed(report: Report) -> None:
    """Name the processes that have to end with this one."""
    import psutil  # type: ignore[import-untyped]

    report.add("processes", [child.pid for child in psutil.Process().children(recursive=True)])
    await asyncio.sleep(3600)


Part = Callable[[Report, Path], Coroutine[Any, Any, None]]
PARTS: dict[str, Part] = {
    "speed": beside_bare,
    "plain": plain,
    "batch-invariant": batch_invariant,
    "batch-invariant-flash": partial(batch_invariant, attention_backend="FLASH_ATTN"),
    "adapters": adapters,
    "tensor-parallel": tensor_parallel,
}


def command(part: str, work: Path, output: Path) -> list[str]:
    """This script for one part."""
    options = {"--part": part, "--work": str(work), "--output": str(output)}
    return [sys.executable, "-m", "benchmarks.serving_vllm", *(text for pair in options.items() for text in pair)]


def run_part(name: str, work: Path) -> dict[str, Any]:
    """Run a part in a process of its own, which is killed once it names its processes."""
    path, log = work / f"{name}.json", work / f"{name}.log"
    path.unlink(missing_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(command(name, work, path), stdout=output, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + PART_SECONDS
    found: dict[str, Any] = {}
    while time.monotonic() < deadline and process.poll() is None and "processes" not in found:
        time.sleep(0.5)
        with suppress(ValueError):
            found = json.loads(path.read_text()) if path.exists() else {}
    process.kill()
    code = process.wait()
    found = json.loads(path.read_text()) if path.exists() else {}
    if "processes" in found:
        found["all of vLLM's processes end with their owner"] = all_exit(found.pop("processes"))
    elif code != 0:
        found["error"] = f"exit code {code}: {log.read_text()[-1500:]}"
        print(log.read_text()[-3500:], flush=True)
    return found


def all_exit(pids: list[int]) -> bool:
    """Whether processes end within some seconds."""
    import psutil

    deadline = time.monotonic() + EXIT_SECONDS
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.2)
    return False


def run_all(output: Path, names: Sequence[str], work: Path) -> None:
    """Run parts one after the other and write their results."""
    import torch

    found: dict[str, Any] = {
        "commit": commit(),
        "device": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "vllm": "0.24.0",
        "model": "LlamaForCausalLM, 1.1 billion random parameters, bfloat16",
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "streams": STREAMS,
        "runs": RUNS,
        "spread": "median, lowest, highest; tokens per second of runs, milliseconds of requests",
    }
    if not (work / "model/config.json").is_file():
        subprocess.run(command("model", work, output), check=True)
    for name in names:
        if name == "tensor-parallel" and torch.cuda.device_count() < 2:
            continue
        start = time.monotonic()
        found[name] = run_part(name, work)
        print(name, f"{time.monotonic() - start:.0f} s", json.dumps(found[name]), flush=True)
        output.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "serving_vllm", help="Models, logs.")
    parser.add_argument("--part", choices=["model", *PARTS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "model":
        write_model(options.work / "model")
    elif options.part:
        asyncio.run(PARTS[options.part](Report(options.output), options.work / "model"))
    else:
        options.work.mkdir(parents=True, exist_ok=True)
        run_all(options.output, options.parts, options.work)


if __name__ == "__main__":
    main()
