"""Loading of a pretrained model in 4 bits: each matrix is quantized as it is read, so the model is never whole.

It uses the interface by which transformers lets other libraries quantize (`transformers.quantizers.HfQuantizer`,
transformers 5.23). A model of 70 billion parameters then takes 42 GB of memory while it is loaded, and not 141.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin

from spotune_trainer.models.quantization.nf4 import Linear4bit, quantize, quantize_layers

_METHOD = "spotune_nf4"


@register_quantization_config(_METHOD)
class Nf4Config(QuantizationConfigMixin):
    """The argument `quantization_config` of `from_pretrained`.

    Args:
        kept: names of modules of a model that stay as they are; the output projection does in any case.
    """

    quant_method: Any = _METHOD

    def __init__(self, kept: Callable[[PreTrainedModel], Sequence[str]]) -> None:
        self.kept = kept


@register_quantizer(_METHOD)
class _Nf4Quantizer(HfQuantizer):
    """Called by `from_pretrained`: before it reads weights, for each of them, and afterwards."""

    quantization_config: Any

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self._quantize = _Quantize()

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        quantize_layers(model, self.quantization_config.kept(model))

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        module, name = get_module_from_name(model, param_name)
        return isinstance(module, Linear4bit) and name == "weight"

    def get_quantize_ops(self) -> ConversionOps:
        return self._quantize

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        for name, (codes, absmax) in self._quantize.matrices.items():
            module: Any = get_module_from_name(model, name)[0]
            module.keep(codes, absmax, module.weight.dtype)
        self._quantize.matrices.clear()
        remove: Any = self.remove_quantization_config
        remove(model)  # it would be exported with the model

    @property
    def is_trainable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return False


class _Quantize(ConversionOps):
    """Quantizes matrices.

    Attributes:
        matrices: codes and absmax by the name of the parameter. Modules get them when all weights are read: until then
            transformers replaces the content of buffers that are not saved with a model.
    """

    def __init__(self) -> None:
        self.matrices: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **context: Any
    ) -> dict[str, Any]:
        """From the names of parameters and their values to what replaces them: nothing."""
        converted = {}
        for name, values in input_dict.items():
            module, _ = get_module_from_name(context["model"], name)
            matrix = (values[0] if isinstance(values, list) else values).to(module.weight.dtype)
            self.matrices[name] = quantize(matrix)
            module._is_hf_initialized = True
            converted[name] = matrix.new_empty(0)
        return converted
