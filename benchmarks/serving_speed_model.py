"""The model that `benchmarks.serving_speed` serves: the shape of Llama 3 8B, without weights, and a tokenizer."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any

VOCABULARY, MAX_LENGTH, EOS = 128_256, 2048, 0

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_LENGTH,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": EOS,
    "eos_token_id": EOS,
}


def write_model(directory: Path) -> None:
    """Write configuration and tokenizer. No weights: vLLM fills them with random numbers (`--load-format dummy`)."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    """A byte-level BPE tokenizer as large as Llama 3's: bytes, and words of up to four letters after a space.

    Every word after a space is one token, so the text of random tokens has as many tokens again.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    space = "\u0120"  # how byte-level BPE writes a space
    words: list[str] = []
    merges: list[tuple[str, str]] = []
    for length in (1, 2, 3, 4):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            merges.append((space + "".join(letters[:-1]), letters[-1]))
            words.append(space + "".join(letters))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    free = VOCABULARY - 1 - len(alphabet)
    tokens = ["<|end|>", *alphabet, *words[:free]]
    bpe = models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges[:free])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", model_max_length=MAX_LENGTH)
    fast.save_pretrained(directory)
