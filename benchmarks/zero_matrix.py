r"""Checks at full size that a checkpoint of any ZeRO stage and world size restores bit for bit at any other.

Trains a Llama with random weights in bfloat16 for one to three steps at each stage and world size, and commits during
the next step, as the trainer does. Restores each checkpoint at each stage and world size. Compares master weights,
moments and step with the state that DeepSpeed reported in the writer, and the model's weights with the masters. At
stage 2 the GPU is filled before the commit, so the commit finds no space for a copy on the GPU. Runs the same code as
the matrix of tiny models in tests/trainer/engine/test_zero_state.py. Does not use Ray: torchrun starts the ranks.

    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/zero_matrix.py --folder /dev/shm \
        --output benchmarks/results/zero_matrix_2.json
"""

from __future__ import annotations

import argparse
import gc
import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.trainer.support.layout_matrix import STATE_BYTES, Cell, Matrix, Written
from tests.trainer.support.layouts import DTYPES, Layout, process_group, wrap
from tests.trainer.support.measured import LLAMAS, from_first_rank, machine, publish, torchrun_group

STAGES = (1, 2, 3)
FILLED_STAGE = 2
LEFT = 0.09
"""Fraction of the GPU that stays free when it is filled. A commit copies within the GPU only if a tenth stays free."""


def build(size: str, layout: Layout) -> Any:
    """An engine with the model of a size, on the GPU if there is one."""
    gc.collect()
    device = "cpu"
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        device = "cuda"
    torch.manual_seed(0)
    with torch.device(device):
        auto_model: Any = AutoModelForCausalLM
        model = auto_model.from_config(LlamaConfig(**LLAMAS[size]), dtype=DTYPES[layout.dtype])
    print(f"rank {distributed.get_rank()}: {layout} at {time.monotonic():.0f} s", flush=True)
    return wrap(model, layout)


@contextmanager
def fill_gpu(layout: Layout) -> Iterator[None]:
    """Fill the GPU nearly completely, at one of the stages."""
    ballast = None
    if layout.stage == FILLED_STAGE and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        ballast = torch.empty(max(0, free - int(LEFT * total)), dtype=torch.uint8, device="cuda")
    yield
    del ballast


def layout_fields(layout: Layout) -> dict[str, int]:
    """The fields of a layout in the result."""
    return {"zeroStage": layout.stage, "worldSize": layout.world_size}


def commits(written: Sequence[Written]) -> list[dict[str, Any]]:
    """The commits of all layouts. Seconds are measured on rank 0, which completes the commit."""
    return [
        {
            "wrote": layout_fields(one.wrote),
            "copiedWithinDevice": torch.cuda.is_available() and not one.from_originals,
            "seconds": round(one.seconds, 2),
            "norms": {state: float(f"{norm:.6g}") for state, norm in one.norms.items()},
        }
        for one in written
        if one.rank == 0
    ]


def pairs(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The result for each pair of layouts, over all ranks of the reader."""
    found = []
    for (wrote, reads), of_pair in itertools.groupby(cells, key=lambda cell: (cell.wrote, cell.reads)):
        ranks = list(of_pair)
        found.append(
            {
                "wrote": layout_fields(wrote),
                "reads": layout_fields(reads),
                "bitEqual": not any(cell.differing for cell in ranks),
                "differing": sorted({name for cell in ranks for name in cell.differing}),
                "bytesRead": [cell.bytes_read for cell in ranks],
                "bytesNeeded": [cell.bytes_needed for cell in ranks],
                "seconds": round(max(cell.seconds for cell in ranks), 2),
            }
        )
    return found


def order(cell: Cell) -> tuple[int, ...]:
    """Sort key: reader, writer, rank."""
    return cell.reads.world_size, cell.reads.stage, cell.wrote.world_size, cell.wrote.stage, cell.rank


def main() -> None:
    """Compare all pairs up to the number of ranks; rank 0 prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=LLAMAS, default="1.1B", help="size of the model")
    parser.add_argument("--rows", type=int, default=2, help="rows of random tokens per step and rank")
    parser.add_argument("--length", type=int, default=512, help="tokens per row")
    parser.add_argument(
        "--world-sizes", type=int, nargs="+", help="world sizes to test; default: all up to that of torchrun"
    )
    parser.add_argument("--folder", type=Path, help="folder for checkpoints (six with two ranks)")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    started = time.monotonic()
    with torchrun_group() as (rank, world_size):
        world_sizes = options.world_sizes or range(1, world_size + 1)
        root: Path = from_first_rank(Path(tempfile.mkdtemp(dir=options.folder)) if rank == 0 else None)
        matrix = Matrix(
            root,
            [Layout(stage, ranks, "bfloat16") for ranks in world_sizes for stage in STAGES],
            build=lambda layout: build(options.size, layout),
            shape=(options.rows, options.length),
            circumstances=fill_gpu,
        )
        matrix.run(rank)
        gathered: list[Any] = [None] * world_size
        with process_group(rank, world_size, root / "gather"):
            distributed.all_gather_object(gathered, (matrix.written, matrix.cells))
    if rank == 0:
        shutil.rmtree(root, ignore_errors=True)  # the other ranks remove the previous group's store
        cells = sorted((cell for _, of_rank in gathered for cell in of_rank), key=order)
        found = pairs(cells)
        bytes_needed = next(sum(pair["bytesNeeded"]) for pair in found)
        result = {
            "machine": machine(),
            "model": options.size,
            "parameters": bytes_needed // STATE_BYTES,
            "dtype": "bfloat16",
            "gigabytesOfACheckpoint": round(bytes_needed / 1e9, 2),
            "pairs": len(found),
            "pairsBitEqual": sum(pair["bitEqual"] for pair in found),
            "pairsThatReadWhatTheyNeedAlone": sum(pair["bytesRead"] == pair["bytesNeeded"] for pair in found),
            "seconds": round(time.monotonic() - started),
            "commits": commits(matrix.written),
            "found": found,
        }
        assert len(found) == len(matrix.layouts) ** 2
        publish(result, options.output)


if __name__ == "__main__":
    main()
