"""What `spotune serve` and the script of `make demo` tell their reader to run works as it is written."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from spotune.prompting.export_manifest import MANIFEST
from spotune_trainer.export.predict import Predictor
from tests import ROOT
from tests.serve.support.exported import export_tiny_model
from tests.serve.support.live_service import SPOTUNE, ServeCommand
from tests.serve.support.toy_adapters import PEFT_WARNING, save_adapter_of

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings(PEFT_WARNING)]
ASK = ROOT / "examples/text-to-sql/ask.sh"
PROMPT = "{question} | {columns}"
PLACEHOLDERS = {"question": "...", "columns": "..."}
PATIENCE_SECONDS = 120.0


def predicted(model: Path, fields: dict[str, str]) -> str:
    """The answer of `spotune predict`."""
    predictor = Predictor.load(model)
    (prediction,) = predictor.answer([predictor.prompt("", fields)])
    return prediction.answer


def answer_of(command: str) -> str:
    """The answer that a shell command prints as the response of /v1/predict."""
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )  # fmt: skip
    (prediction,) = json.loads(done.stdout)["predictions"]
    return str(prediction["answer"])


@pytest.mark.long
def test_the_printed_curl_and_one_that_names_an_adapter_answer(tmp_path: Path) -> None:
    model = export_tiny_model(tmp_path / "model", "causal", PROMPT)
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    base = AutoModelForCausalLM.from_pretrained(model)
    save_adapter_of(base, adapter, ["q_proj", "v_proj"], seed=1).save_pretrained(merged)
    for name in ("tokenizer.json", "tokenizer_config.json", MANIFEST):
        shutil.copy(model / name, merged)
    with ServeCommand(model, "--adapter", f"polite={adapter}") as service:
        line = service.read_ready_line("curl ")
        answer = answer_of(line)
        *words, body = shlex.split(line)
        of_the_adapter = answer_of(shlex.join([*words, json.dumps({**json.loads(body), "model": "polite"})]))
        code, errors = service.stop()
    assert (code, errors) == (0, "")
    assert answer == predicted(model, PLACEHOLDERS)
    assert of_the_adapter == predicted(merged, PLACEHOLDERS)
    assert answer != of_the_adapter


@pytest.mark.long
def test_the_script_of_the_demo_asks_and_ends(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    model = export_tiny_model(run / "export", "seq2seq", PROMPT)
    spotune = tmp_path / "spotune"
    spotune.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-c", SPOTUNE])} "$@"\n')
    spotune.chmod(0o755)
    done = subprocess.run(
        [ASK, run],
        env={**os.environ, "SPOTUNE": str(spotune), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown, answered = done.stdout.splitlines()
    (row,) = re.findall(r"-d '(.+)'$", shown)
    (prediction,) = json.loads(answered)["predictions"]
    assert prediction["answer"] == predicted(model, json.loads(row)["row"]) != ""
