"""Model FLOPs utilisation (MFU) of the batches that a rank trains on."""

from __future__ import annotations

import torch

from spotune_trainer.data.batches import Batch
from spotune_trainer.models.flops import ModelShape, mfu, peak_flops


class MfuMeter:
    """Counts the floating-point operations of batches, and divides them by what the devices could do.

    Args:
        shape: parameters, layers and widths of the model.
        peak_flops: floating-point operations per second of one device; None if unknown, as on a CPU.
    """

    def __init__(self, shape: ModelShape, peak_flops: float | None) -> None:
        self._shape = shape
        self._peak_flops = peak_flops

    @classmethod
    def for_this_device(cls, shape: ModelShape, dtype: str) -> MfuMeter:
        """Meter for the GPU of this process, which computes in `dtype`; on a CPU there is no known peak."""
        return cls(shape, peak_flops(torch.cuda.get_device_name(), dtype) if torch.cuda.is_available() else None)

    def flops(self, batch: Batch) -> float:
        """Floating-point operations of the forward and backward pass of one batch on the host, without its padding.

        Tokens of a packed document attend to that document only. Mismatched documents have a forward pass only.
        """
        if batch.cu_seq_lens is not None:
            flops = sum(self._shape.flops(1, length) for length in batch.document_lengths().tolist())
        else:
            rows = zip(batch.input_lengths.tolist(), batch.label_lengths.tolist(), strict=True)
            flops = sum(self._shape.flops(1, *lengths) for lengths in rows)
        if batch.mismatched is not None:
            flops += sum(self._shape.forward_flops(1, length) for length in batch.mismatched.input_lengths.tolist())
        return flops

    def mfu(self, flops: float, seconds: float, world_size: int) -> float | None:
        """MFU of `flops` operations in `seconds` on `world_size` devices, in [0, 1]; None if the peak is unknown."""
        used = mfu(flops, seconds, world_size, self._peak_flops)
        return None if used is None else round(used, 4)
