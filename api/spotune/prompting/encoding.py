"""Token ids of prompts as the model sees them in training.

The tokenizer is any tokenizer of transformers. This package does not import transformers.
"""

from collections.abc import Sequence
from typing import Any, Literal

from spotune.prompting.export_manifest import ExportManifest

Task = Literal["causal", "seq2seq"]


def encode_prompts(tokenizer: Any, task: Task, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of prompts as the model sees them in training, not truncated.

    They contain the special tokens that the tokenizer adds. The one exception: a trailing end-of-text token is removed
    from causal prompts, because the completion continues the text.
    """
    if not prompts:
        return []
    # verbose=False: no warning about texts beyond the model's limit, since they are truncated afterwards.
    encoded: list[list[int]] = tokenizer(list(prompts), verbose=False)["input_ids"]
    if task == "seq2seq":
        return encoded
    eos_token_id = tokenizer.eos_token_id
    return [ids[:-1] if ids and ids[-1] == eos_token_id else ids for ids in encoded]


def truncate_prompt(ids: list[int], max_length: int, eos_token_id: int) -> list[int]:
    """The first ``max_length`` tokens of a seq2seq input; a trailing end-of-text token is kept as the last one."""
    if len(ids) <= max_length:
        return ids
    return [*ids[: max_length - 1], eos_token_id] if ids[-1] == eos_token_id else ids[:max_length]


def encode_for_inference(tokenizer: Any, manifest: ExportManifest, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of rendered prompts, as an exported model saw them in training.

    Seq2seq inputs are truncated to the model's maximum length. A rendered chat already has its special tokens.
    """
    if manifest.task == "seq2seq":
        encoded = encode_prompts(tokenizer, "seq2seq", prompts)
        return [truncate_prompt(ids, manifest.max_length, int(tokenizer.eos_token_id)) for ids in encoded]
    if manifest.messages:
        ids: list[list[int]] = tokenizer(list(prompts), add_special_tokens=False, verbose=False)["input_ids"]
        return ids
    return encode_prompts(tokenizer, "causal", prompts)
