"""The GPU's memory beside the weights: how many tokens a replica can cache, and errors that name the fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from spotune.errors import JobError
from spotune_serve.engine.model import LoadedModel

_CACHE_FRACTION = 0.5
"""Part of the free memory for keys and values. A growing batch copies them, layer by layer, and torch keeps blocks of
the former size; activations and logits need memory, too."""
_MIN_CACHED_TOKENS = 512
"""A replica that can cache less answers hardly any request. Models with shorter sequences need only one of them."""
_FIX = (
    "Use a GPU with more memory or a smaller model; where replicas divide a GPU, start fewer of them (--replicas); or "
    "let vLLM split a causal model over several GPUs (engine: vllm, gpus: 2 or more)."
)


def cached_tokens_limit(model: LoadedModel, directory: Path, most: int, share: float = 1.0) -> int:
    """The tokens whose keys and values fit into the memory of the model's GPU, at most `most`.

    Args:
        model: loaded, with its adapters.
        directory: of the model, for the error.
        most: the limit where memory is plentiful.
        share: part of the GPU that belongs to the replica, in (0, 1]. Others may start later and need theirs.

    Raises:
        JobError: too few tokens fit.
    """
    token_bytes = cached_token_bytes(model)
    torch.cuda.empty_cache()  # what torch keeps for itself is free, too
    free, total = torch.cuda.mem_get_info(model.device)
    usable = int(min(free, total * share) * _CACHE_FRACTION)
    tokens = min(most, usable // token_bytes)
    needed = min(_MIN_CACHED_TOKENS, model.max_positions or _MIN_CACHED_TOKENS)
    if tokens < needed:
        raise JobError(
            f"the GPU has no memory left for the key/value cache of the model in {directory}: {usable / 2**20:,.0f} "
            f"MiB beside the weights, which is {tokens:,} tokens of {token_bytes:,} bytes; at least {needed} are "
            f"needed. {_FIX}"
        )
    return tokens


def cached_token_bytes(model: LoadedModel) -> int:
    """Bytes of the keys and values of one token: 2 x layers x key/value heads x head size x bytes of a number.

    The formula is that of Kwon et al. 2023 (PagedAttention, arXiv 2309.06180), section 3. The sizes are those of the
    cache of one token, because configurations name them differently, and layers may differ. An encoder's token takes as
    much in the cross-attention's cache as a decoder's in its own.
    """
    with torch.inference_mode():
        _, caches = model.prefill((0,), model.settings.decoder_start or (0,))
    sizes: list[int] = []
    for cache in caches:
        layers: list[Any] = cache.layers
        sizes.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in layers))
    return max(sizes)


@contextmanager
def memory_errors(directory: Path) -> Iterator[None]:
    """Turn a GPU that runs out of memory while the model is loaded into a JobError.

    Args:
        directory: of the model.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        reason = str(error).partition("\n")[0]
        if "out of memory" not in reason:
            raise
        raise JobError(f"the model in {directory} does not fit into the GPU's memory: {reason} {_FIX}") from error
