"""Continue a dataloader in the middle of an epoch, with the samples of an undisturbed run.

Lightning counts the batches of an epoch, but begins with the first one again, unless the dataloader saves its own
position. A shuffled order depends on the state of the random number generator when the epoch began. So that state is
kept, set again, and the batches that have been trained on are drawn without loading them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from spotune_train.random_states import random_states, set_random_states
from spotune_train.sampling import Samples


class Position:
    """Where training is in the dataloader.

    Args:
        saved: what `state` has returned; None: training begins.
    """

    def __init__(self, saved: dict[str, Any] | None) -> None:
        self._to_restore = saved
        self._order: dict[str, Any] | None = None  # random states from which the order of this epoch was drawn

    def state(self, batches: int) -> dict[str, Any]:
        """The position after so many batches of the epoch; 0: between two epochs."""
        return {"batches": batches, "order": self._order, "random": random_states()}

    def follow(self, loader: Any, epoch: int) -> Any:
        """A dataloader that begins at the saved position, and from then on keeps what `state` needs.

        Dataloaders that save their own position are returned as they are.

        Args:
            loader: of this rank.
            epoch: that training is in, 0-based.
        """
        if self._to_restore is not None and not self._to_restore["batches"]:
            self.restore_random_states()  # the epoch's order is drawn from them
        if isinstance(loader, Samples) or (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
            return loader
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return _Followed(loader, self.iterate)
        samplers: list[Any] = [loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)  # worker processes draw the first batches before Lightning sets it
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        vars(loader)[name] = _Followed(getattr(loader, name), self.iterate)  # a DataLoader refuses an assignment
        return loader

    def restore_random_states(self) -> None:
        """Set the random states of the saved position, unless that has been done."""
        saved, self._to_restore = self._to_restore, None
        if saved is not None:
            set_random_states(saved["random"])

    def iterate(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of an epoch, or their indices; of the first one, those after the saved position."""
        saved = self._to_restore
        if saved is not None and saved["order"] is not None:
            set_random_states(saved["order"])
        self._order = random_states()
        iterator = iter(batches)
        for _ in range(saved["batches"] if saved is not None else 0):
            next(iterator)
        self.restore_random_states()
        yield from iterator


class _Followed:
    """Batches, or a sampler of them, with the attributes of the original."""

    def __init__(self, original: Any, iterate: Callable[[Iterable[Any]], Iterator[Any]]) -> None:
        self._original = original
        self._iterate = iterate

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(self._original)

    def __len__(self) -> int:
        return len(self._original)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # while it is copied, there is no original
        return getattr(self._original, name)
