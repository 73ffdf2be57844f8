"""A program for torchrun: a small recurrent network learns to continue counting, one digit after the other.

It is an ordinary program with PyTorch's DistributedDataParallel. Four lines of `spotune_train` make it continue exactly
where it was after a loss. The rows are made here, so that nothing is downloaded.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import spotune_train

DIGITS = 10
LENGTH = 12


def made_rows(count: int) -> list[Tensor]:
    """Rows of digits that count up by a step of their own: int64 `[LENGTH + 1]` each."""
    random = torch.Generator().manual_seed(0)
    starts = torch.randint(DIGITS, (count, 1), generator=random)
    steps = torch.randint(1, DIGITS, (count, 1), generator=random)
    return list((starts + steps * torch.arange(LENGTH + 1)) % DIGITS)


class Counter(nn.Module):
    """Predicts the next digit from those before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIGITS, 16)
        self.memory = nn.GRU(16, 32, batch_first=True)
        self.output = nn.Linear(32, DIGITS)

    def forward(self, digits: Tensor) -> Tensor:
        """Scores `[batch, length, DIGITS]` of the digit after each of `digits` `[batch, length]`."""
        states, _ = self.memory(self.embedding(digits))
        scores: Tensor = self.output(states)
        return scores


def main() -> None:
    """Train on all processes that torchrun has started."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of a step over all processes")
    parser.add_argument("--save-every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, to watch it")
    options = parser.parse_args()

    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(1)
    model = Counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    checkpoint = spotune_train.checkpoint.latest()
    if checkpoint is not None:  # after a loss of workers, training continues here
        state = checkpoint.load()
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    parallel_model = DistributedDataParallel(model)

    samples = spotune_train.samples(made_rows(options.rows), options.batch_size, epochs=options.epochs)
    for step, rows in samples:
        batch = torch.stack(rows)
        scores = parallel_model(batch[:, :-1])
        loss = cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        time.sleep(options.pause)
        spotune_train.report(step, loss.detach(), total_steps=samples.total_steps)
        if step % options.save_every == 0 or step == samples.total_steps:
            spotune_train.checkpoint.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
