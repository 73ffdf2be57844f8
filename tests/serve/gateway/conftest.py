"""Served models for the tests of the gateway."""

from __future__ import annotations

import pytest

from spotune_serve.gateway.served_model import ServedModel
from tests.serve.support.served_models import SQL_TEMPLATE, load_model


@pytest.fixture(scope="session")
def sql_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """An encoder-decoder model of a job with a template of two columns."""
    return load_model(tmp_path_factory.mktemp("sql"), "seq2seq", prompt=SQL_TEMPLATE)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """A causal model with a chat template."""
    return load_model(tmp_path_factory.mktemp("chat"), messages="messages", chat=True)
