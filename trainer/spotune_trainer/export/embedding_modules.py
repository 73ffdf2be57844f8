"""The files that sentence-transformers needs beside a transformers model: how embeddings are made of its outputs.

Versions from 2.3 read them. Names and keys are those that its `SentenceTransformer.save_pretrained` has written since.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from spotune.job import FinetuneJob
from spotune_trainer import files

_POOLING: Final = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "lastToken": "pooling_mode_lasttoken",
}


def write_modules(directory: Path, job: FinetuneJob, embedding_size: int) -> None:
    """Write the description of the modules: transformer, pooling and, if the job asks for it, normalization.

    Args:
        directory: the export.
        job: its `training.embedding` and templates of texts.
        embedding_size: width of an embedding.
    """
    embedding, dataset = job.spec.training.embedding, job.spec.dataset
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] * embedding.normalize)]
    files.write_json(
        directory / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
            for index, (path, name) in enumerate(modules)
        ],
    )
    for path, _ in modules[1:]:
        (directory / path).mkdir()
    pooling = {key: mode == embedding.pooling for mode, key in _POOLING.items()}
    files.write_json(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": embedding_size, **pooling})
    files.write_json(
        directory / "sentence_bert_config.json", {"max_seq_length": dataset.max_length, "do_lower_case": False}
    )
    prompts = {"query": _prefix(dataset.query), "document": _prefix(dataset.positive)}
    similarity = "cosine" if embedding.normalize else "dot"
    files.write_json(
        directory / "config_sentence_transformers.json",
        {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": similarity},
    )


def _prefix(template: str) -> str:
    """The text before the only column of a template, such as that of "query: {question}"; empty for other templates."""
    found = re.fullmatch(r"([^{}]*)\{[^{}]+\}", template)
    return found.group(1) if found else ""
