"""Models with embeddings: which sources are refused, and which layers they lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from spotune.errors import JobError
from spotune_trainer.models.pretrained import build_model
from tests.trainer.support.embedding import embedding_job


def changed(job: Any, section: str, **values: Any) -> Any:
    """The job with other values in a section of its spec."""
    before = getattr(job.spec, section)
    spec = job.spec.model_copy(update={section: before.model_copy(update=values)})
    return job.model_copy(update={"spec": spec})


def test_texts_longer_than_the_positions_of_a_model_are_refused(tmp_path: Path) -> None:
    job = embedding_job(tmp_path)
    assert build_model(changed(job, "given_dataset", max_length=128)).pooler is None
    with pytest.raises(JobError, match=r"dataset\.maxLength: 129 tokens are more than the 128 positions"):
        build_model(changed(job, "given_dataset", max_length=129))


def test_a_model_of_two_parts_is_refused(tmp_path: Path) -> None:
    job = embedding_job(tmp_path)
    AutoConfig.for_model("bart").save_pretrained(tmp_path / "model")
    with pytest.raises(JobError, match="embedding is not supported for bart models"):
        build_model(job)
