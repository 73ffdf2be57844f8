"""`spotune plan` shows what the plan is in each pool of a job."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from spotune.plan.devices import device_of_gpu_type
from tests.command_line import run_spotune

JOB = """\
apiVersion: spotune.dev/v1alpha1
kind: FinetuneJob
metadata: {name: t5-wikisql}
spec:
  model: {source: "hf://google-t5/t5-3b", task: seq2seq}
  dataset: {train: {source: shards}, maxLength: 512, maxCompletionLength: 128}
  training: {epochs: 3, globalBatchSize: 96}
  execution: {precision: PRECISION}
  workers:
    count: 4
    pools:
      - {name: sure, capacity: on-demand, gpuType: nvidia-h100-80gb, price: 9 USD, max: 2}
      - {name: big, gpuType: NVIDIA-A100-SXM4-80GB, price: 1.10 USD, max: 3}
      - {name: small, gpuType: nvidia-l4, price: 0.28 USD}
      - {name: odd, gpuType: Gaudi, price: 2 USD}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(JOB.replace("PRECISION", "auto"))
    return file


def pools(file: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, dict[str, Any]]:
    code, out, err = run_spotune(capsys, "plan", file, "--output", "json", *options)
    assert (code, err) == (0, "")
    return {pool["name"]: pool for pool in json.loads(out)["pools"]}


def test_each_pool_has_the_plan_of_its_gpu_and_number_of_workers(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = pools(job, capsys)
    assert list(found) == ["small", "big", "odd", "sure"], "the cheapest first"
    big, small = found["big"], found["small"]
    assert (big["workers"], big["costPerHour"], big["currency"]) == (3, 3.3, "USD")
    assert big["plan"]["device"]["description"] == "a100-80gb"
    code, alone, _ = run_spotune(capsys, "plan", job, "--output", "json", "--device", "l4", "--workers", "4")
    assert code == 0
    assert json.loads(alone)["workers"] == [small["plan"]], "the same plan as for this GPU alone"
    assert small["plan"]["layout"]["microBatchSize"] > 0
    assert found["odd"]["problem"] == "gpuType Gaudi is not known: pass --device or --device-memory."
    assert pools(job, capsys, "--device", "h200")["odd"]["plan"]["device"]["description"] == "h200"


def test_table_has_a_row_per_pool_and_says_which_gpu_cannot_compute_so(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    text = JOB.replace('google-t5/t5-3b", task: seq2seq', 'meta-llama/Llama-3.1-8B", task: causal')
    job.write_text(text.replace(", maxCompletionLength: 128", "").replace("PRECISION", "fp8"))
    code, out, _ = run_spotune(capsys, "plan", job, "--device", "h100-80gb")
    assert code == 0
    assert re.search("sure +│ on-demand", out)
    assert "18.00 USD" in out
    assert "Pool big: execution.precision: fp8 needs a GPU of compute capability 8.9 or higher" in out


@pytest.mark.parametrize(
    ("label", "device"),
    [
        ("nvidia-tesla-t4", "t4"),
        ("nvidia-tesla-a100", "a100-40gb"),
        ("nvidia-a100-80gb", "a100-80gb"),
        ("NVIDIA-A100-SXM4-80GB", "a100-80gb"),
        ("Tesla-V100-SXM2-32GB", "v100-32gb"),
        ("nvidia-h100-mega-80gb", "h100-80gb"),
        ("nvidia-h200-141gb", "h200"),
        ("NVIDIA-GeForce-RTX-4090", "rtx4090"),
        ("NVIDIA-L40S", "l40s"),
        ("a10g", "a10g"),
        ("h100", "h100-80gb"),
        ("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", None),
        ("NVIDIA-A100-SXM4-96GB", None),
        ("Gaudi", None),
        ("", None),
    ],
)
def test_labels_of_nodes_name_known_gpus(label: str, device: str | None) -> None:
    assert device_of_gpu_type(label) == device
