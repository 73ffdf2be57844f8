"""Bodies of `/v1/models`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """A model of this service. An adapter's parent is the model that it changes. `version` has most of the requests."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "spotune"
    root: str
    parent: str | None = None
    max_model_len: int
    version: str


class ModelList(BaseModel):
    """All models of this service."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
