"""SmolLM2 learns what a small real corpus teaches, by SFT and by DPO (benchmarks/smollm2.py measures it)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import smollm2

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(5400)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    try:
        smollm2.model_folder()
    except smollm2.WeightsUnavailableError as error:
        pytest.skip(str(error))
    return smollm2.finetune(tmp_path_factory.mktemp("smollm2"), smollm2.Size())


def test_sft_learns_the_sentences_and_their_form(results: dict[str, Any]) -> None:
    before, after = results["before"], results["sft"]["after"]
    assert after["loss"] < before["loss"] - 0.5
    assert after["sentences"] > before["sentences"] + 0.3


def test_dpo_learns_the_style_of_the_chosen_answers(results: dict[str, Any]) -> None:
    before, after = results["sft"]["after"], results["dpo"]["after"]
    assert before["preferred"] < 0.3
    assert after["preferred"] > 0.7
    assert after["descriptive"] > before["descriptive"] + 0.3


def test_results_of_the_runs_are_those_of_transformers(results: dict[str, Any]) -> None:
    """The loss of held-out rows, and the pairs for which DPO's reward prefers the chosen answer."""
    sft = results["sft"]
    assert sft["evalLoss"] == pytest.approx(sft["after"]["loss"], abs=2e-3)
    assert results["dpo"]["scores"]["rewardAccuracy"] > 0.7


COMMITTED = json.loads(Path("benchmarks/results/smollm2.json").read_text(encoding="utf-8"))


def test_the_committed_output_is_of_this_corpus() -> None:
    corpus = smollm2.read_corpus().describe()
    if corpus["source"] != COMMITTED["corpus"]["source"]:
        pytest.skip(f"the committed output is of {COMMITTED['corpus']['source']}, not of {corpus['source']}")
    assert corpus == COMMITTED["corpus"]


def test_the_committed_output_is_of_these_settings() -> None:
    base, size = Path("/model"), smollm2.Size()
    for name, spec in (("sft", smollm2.sft_spec(base, size)), ("dpo", smollm2.dpo_spec(base, size))):
        assert COMMITTED[name]["steps"] == spec["training"]["maxSteps"]
        assert COMMITTED[name]["training"]["learningRate"] == spec["training"]["learningRate"]
