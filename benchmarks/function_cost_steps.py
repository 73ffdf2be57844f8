"""The training function of `function_cost.py`, and the bare `TorchTrainer` that calls it.

    python -m benchmarks.function_cost_steps '{"output": "/tmp/measured", ...}'

Steps come in blocks. Every second block reports nothing, so that steps with and without reports are measured by turns
in the same process. Under the bare trainer only steps that save report: Ray's controller takes one report every two
seconds, and `ray.train.report` waits for it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, DistributedSampler

import spotune_train

WIDTH = 512
LAYERS = 4
ROWS = 2560
BATCH = 320
"""Rows of a step of each worker."""


def train(config: dict[str, Any]) -> None:
    """Train `steps` steps, and write what they took to `output`/rank-<rank>.json.

    Args:
        config: `library` (report by `spotune_train`, or by Ray Train), `steps`, `blockSteps` (0: report only with
            checkpoints), `saveEverySteps`, `launched` (time of the launch, seconds since the epoch) and `output` (a
            folder).
    """
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    lines: list[dict[str, Any]] = []
    first_step = 0.0
    batches = library_batches(config["steps"]) if config["library"] else loader_batches(config["steps"])
    began, began_cpu = time.perf_counter(), time.process_time()
    for step, batch in batches:
        has_data, has_data_cpu = time.perf_counter(), time.process_time()
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        gradient = torch.cat(
            [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        )
        distributed.all_reduce(gradient)
        optimizer.step()
        reports = bool(config["blockSteps"]) and (step // config["blockSteps"]) % 2 == 0
        saves = step % config["saveEverySteps"] == 0 or step == config["steps"]
        in_call, in_call_cpu = time.perf_counter(), time.thread_time()
        if reports or saves:
            report(step, loss.detach(), model, saves=saves, by_library=config["library"])
        now, now_cpu = time.perf_counter(), time.process_time()
        times = {
            "milliseconds": now - began,
            "cpuMilliseconds": now_cpu - began_cpu,
            "dataMilliseconds": has_data - began,
            "dataCpuMilliseconds": has_data_cpu - began_cpu,
            "callMilliseconds": now - in_call,
            "callCpuMilliseconds": time.thread_time() - in_call_cpu,
        }
        lines.append({"reports": reports, "saves": saves, **{name: 1000 * seconds for name, seconds in times.items()}})
        began, began_cpu = now, now_cpu
        first_step = first_step or time.time()
    found = {"startSeconds": first_step - config["launched"], "steps": lines}
    (Path(config["output"]) / f"rank-{distributed.get_rank()}.json").write_text(json.dumps(found))


def report(step: int, loss: Tensor, model: nn.Module, *, saves: bool, by_library: bool) -> None:
    """Report a step, and save a checkpoint."""
    if by_library:
        spotune_train.report(step, loss)
        if saves:
            spotune_train.checkpoint.save(step, {"model": model.state_dict()})
        return
    if not saves:
        ray.train.report({"loss": loss.item()})
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if distributed.get_rank() == 0:
            torch.save({"model": model.state_dict()}, Path(folder) / "state.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"loss": loss.item()}, checkpoint=checkpoint)


def rows() -> Tensor:
    """The rows: fp32 ``[ROWS, WIDTH]``."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


def library_batches(steps: int) -> Iterator[tuple[int, Tensor]]:
    """Step and batch of this worker, by `spotune_train.samples`."""
    for step, batch in spotune_train.samples(rows(), BATCH * distributed.get_world_size()):
        yield step, torch.stack(batch)
        if step == steps:
            return


def loader_batches(steps: int) -> Iterator[tuple[int, Tensor]]:
    """Step and batch of this worker, by PyTorch's `DistributedSampler` and `DataLoader`."""
    data: Any = rows()
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    step, epoch = 0, 0
    while True:
        sampler.set_epoch(epoch)
        for batch in loader:
            step += 1
            yield step, batch
            if step == steps:
                return
        epoch += 1


def main() -> None:
    """Call the function under the bare `TorchTrainer`, on a Ray of its own."""
    config = json.loads(sys.argv[1])
    # Two CPUs for the workers, and some for Ray Train's own actors: without them it waits for ever.
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(name="bare", storage_path=f"{config['output']}/storage"),
    ).fit()


if __name__ == "__main__":
    main()
