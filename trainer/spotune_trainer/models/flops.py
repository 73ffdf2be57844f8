"""Model FLOPs utilization (MFU): the operations that a step needs by a formula, over what the devices can do.

The formula is llm-foundry's (https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking#mfu), after
PaLM (Chowdhery et al. 2022, appendix B). A token takes 6 N floating-point operations in forward and backward through N
parameters, and 12 L d T in attention over T tokens, in L layers of width d. Recomputed activations do not count. With
an adapter the model's own weights are frozen and get no gradient: 4 N.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spotune.plan.speed.gpus import peaks
from spotune_trainer.models.quantization.nf4 import Linear4bit

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedModel

# Peak dense FLOP/s by dtype. The patterns match torch.cuda.get_device_name(); the first match is taken. The plan does
# not know the PCIe and NVL variants: their peaks are from NVIDIA's data sheets, without sparsity.
_PEAKS: tuple[tuple[str, Mapping[str, float]], ...] = (
    (r"\bB200\b", peaks("b200")),
    (r"\bH100 PCIe", {"bfloat16": 756e12, "float16": 756e12, "float32": 51e12}),
    (r"\bH[12]00 NVL", {"bfloat16": 835.5e12, "float16": 835.5e12, "float32": 60e12}),
    (r"\bG?H[12]00\b", peaks("h200")),  # an H100 has the same
    (r"\bA100\b", peaks("a100-80gb")),
    (r"\bL40S\b", peaks("l40s")),
    (r"\bL4\b", peaks("l4")),
    (r"\bT4\b", peaks("t4")),
    (r"\bV100-PCIE", {"float16": 112e12, "float32": 14e12}),
    (r"\bV100\b", peaks("v100-16gb")),
)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that the formula needs.

    Attributes:
        parameters: number of parameters of the decoder with its embeddings; without an encoder, of the whole model.
        layers: number of layers of the decoder.
        hidden_size: width of a layer.
        encoder_parameters: number of parameters of the encoder; 0 for causal models.
        encoder_layers: number of layers of the encoder; 0 for causal models.
        frozen: the parameters are not trained, only an adapter is. The adapter's parameters are not counted.
    """

    parameters: int
    layers: int
    hidden_size: int
    encoder_parameters: int = 0
    encoder_layers: int = 0
    frozen: bool = False

    @classmethod
    def from_model(cls, model: PreTrainedModel, *, frozen: bool = False) -> ModelShape:
        """The shape of a model whose parameters are not partitioned yet. Shared embeddings count once."""
        config: Any = model.config.get_text_config()
        total, layers = _count(model), int(config.num_hidden_layers)
        if not model.config.is_encoder_decoder:
            return cls(total, layers, int(config.hidden_size), frozen=frozen)
        encoder = _count(model.get_encoder()) - _count(model.get_input_embeddings())
        decoder_layers = getattr(config, "num_decoder_layers", getattr(config, "decoder_layers", layers))
        return cls(total - encoder, int(decoder_layers), int(config.hidden_size), encoder, layers, frozen)

    def flops(self, rows: int, sequence: float, target: float = 0.0) -> float:
        """Floating-point operations of a forward and backward pass.

        Args:
            rows: number of sequences.
            sequence: their length in tokens; for an encoder-decoder, of the input.
            target: length of an encoder-decoder's target in tokens. They attend to the target and to the input.
        """
        if not self.encoder_layers:
            return rows * self._stack_flops(self.parameters, self.layers, sequence, sequence)
        encoder = self._stack_flops(self.encoder_parameters, self.encoder_layers, sequence, sequence)
        decoder = self._stack_flops(self.parameters, self.layers, target, target + sequence)
        return rows * (encoder + decoder)

    def causal_flops(self, documents: Iterable[int]) -> float:
        """Floating-point operations for a causal model's documents, without scores that causal attention masks.

        `flops` counts all scores of a row, as llm-foundry does. Here a token of a document of T tokens attends to T / 2
        of them on average, and to no other document.

        Args:
            documents: their lengths in tokens.
        """
        return sum(self._stack_flops(self.parameters, self.layers, length, length / 2) for length in documents)

    def forward_flops(self, rows: int, sequence: float) -> float:
        """Floating-point operations of a forward pass of a causal model alone; arguments as those of `flops`."""
        return rows * sequence * (2 * self.parameters + 4 * self.layers * self.hidden_size * sequence)

    def _stack_flops(self, parameters: int, layers: int, tokens: float, attended: float) -> float:
        passes = 4 if self.frozen else 6
        return tokens * (passes * parameters + 12 * layers * self.hidden_size * attended)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak dense floating-point operations per second of a device; None if unknown, as for any CPU.

    Args:
        device_name: from `torch.cuda.get_device_name()`.
        dtype: `model.dtype` of the job.
    """
    return next((found.get(dtype) for pattern, found in _PEAKS if re.search(pattern, device_name)), None)


def mfu(flops: float, seconds: float, devices: int, peak: float | None) -> float | None:
    """Fraction of the devices' peak that was used, 0 to 1; None if the peak is unknown or no time has passed."""
    return flops / (seconds * devices * peak) if peak and seconds > 0 else None


def _count(module: Module) -> int:
    quantized = sum(each.in_features * each.out_features for each in module.modules() if isinstance(each, Linear4bit))
    return quantized + sum(parameter.numel() for parameter in module.parameters())
