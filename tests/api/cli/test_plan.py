"""`spotune plan`: table, JSON, the source of the model's configuration, and errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from spotune.cli.hub_cache import HUB_HINT
from spotune.plan.known_models import KNOWN_CONFIGS
from tests.command_line import run_spotune

JOB = """\
apiVersion: spotune.dev/v1alpha1
kind: FinetuneJob
metadata: {{name: t5-wikisql}}
spec:
  model: {{source: "{source}", task: {task}{model}}}
  dataset: {{train: {{source: shards}}, maxLength: 512{dataset}}}
  training: {{epochs: 3, globalBatchSize: 96}}
{more}"""


class Planner:
    """Writes a job file, runs `spotune plan` on it and captures its output."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.file = folder / "job.yaml"
        self.capsys = capsys
        self.job()

    def job(
        self,
        source: str = "hf://google-t5/t5-3b",
        task: str = "seq2seq",
        model: str = "",
        dataset: str = ", maxCompletionLength: 128",
        more: str = "  workers: {count: 4, min: 2}\n",
    ) -> None:
        self.file.write_text(JOB.format(source=source, task=task, model=model, dataset=dataset, more=more))

    def run(self, *options: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        return run_spotune(self.capsys, "plan", self.file, *options)

    def json(self, *options: str) -> dict[str, Any]:
        code, out, err = self.run(*options, "--output", "json")
        assert (code, err) == (0, "")
        plan: dict[str, Any] = json.loads(out)
        return plan


@pytest.fixture
def planner(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Planner:
    monkeypatch.setenv("COLUMNS", "160")
    return Planner(tmp_path, capsys)


def test_table_has_a_column_per_number_of_workers_and_names_what_was_assumed(planner: Planner) -> None:
    code, out, err = planner.run("--workers", "4,1,2,2", "--device", "a100-80gb")

    assert (code, err) == (0, "")
    lines = {line.split("│")[1].strip(): line for line in out.splitlines() if "│" in line}
    assert "t5-wikisql: hf://google-t5/t5-3b (t5), 2,851,598,336 parameters" in out
    assert "96 samples per step of up to 512 + 128 tokens" in out
    assert [part.strip() for part in lines["Weights"].strip("│").split("│")] == ["Weights", *3 * ["5.70 GB"]]
    assert [part.strip() for part in lines["ZeRO stage"].strip("│").split("│")] == ["ZeRO stage", "1", "1", "1"]
    assert [part.strip() for part in lines["Accumulation"].strip("│").split("│")][-1] == "2"
    assert "34.22 GB" in lines["Checkpoint, all workers"]
    copies = [part.strip() for part in lines["Host memory for commits"].strip("│").split("│")]
    assert copies == ["Host memory for commits", "68.44 GB", "51.33 GB", "25.66 GB"]
    kept = [part.strip() for part in lines["Commits kept in memory"].strip("│").split("│")]
    assert kept == ["Commits kept in memory", "2", "2", "2"]
    copied = [part.strip() for part in lines["Copied to another node"].strip("│").split("│")]
    assert copied == ["Copied to another node", "no", "yes", "yes"]
    assert "Host memory for offload" not in lines
    assert "preempted every 6.0 h on average" in out


def test_the_time_of_a_step_is_estimated_for_known_gpus(planner: Planner) -> None:
    planner.file.write_text(planner.file.read_text().replace("epochs: 3", "maxSteps: 7200, epochs: 3"))
    (plan,) = planner.json("--workers", "2", "--device", "h200")["workers"]
    assert plan["tokensPerSecond"] == pytest.approx(96 * 512 / plan["stepSeconds"])
    assert 0 < plan["mfu"] < 1
    assert plan["runSeconds"] == pytest.approx(7200 * plan["stepSeconds"])
    _, out, _ = planner.run("--workers", "2", "--device", "h200")
    lines = {line.split("│")[1].strip(): line for line in out.splitlines() if "│" in line}
    assert f"{plan['stepSeconds']:.2f} s" in lines["Step time (estimated)"]
    assert f"{plan['tokensPerSecond']:,.0f}" in lines["Tokens/s"]
    assert f"{100 * plan['mfu']:.1f} %" in lines["MFU"]
    assert f"{2 * plan['stepSeconds']:.1f} h" in lines["Time of 7,200 steps"]


@pytest.mark.parametrize("options", [("--device", "a10g"), ("--device-memory", "80GB")])
def test_the_time_of_a_step_is_null_for_other_gpus(planner: Planner, options: tuple[str, str]) -> None:
    (plan,) = planner.json("--workers", "8", *options)["workers"]
    assert [plan[key] for key in ("stepSeconds", "tokensPerSecond", "mfu", "runSeconds")] == [None] * 4
    _, out, _ = planner.run("--workers", "8", *options)
    assert "Step time" not in out


def test_use_of_spare_memory_at_stage_3_is_shown(planner: Planner) -> None:
    plan = planner.json("--workers", "8", "--device-memory", "14GB")
    [workers] = plan["workers"]
    gathered = workers["layout"]["gatheredLayers"]
    assert workers["layout"]["zeroStage"] == 3
    assert gathered > 0
    assert f"{gathered} layers gathered once a step" in workers["reason"]


def test_json_has_everything_in_bytes_and_seconds(planner: Planner) -> None:
    plan = planner.json("--workers", "4", "--device-memory", "80GB", "--step-seconds", "2")

    assert plan["model"]["parameters"] == 2_851_598_336
    assert plan["model"]["encoderParameters"] + plan["model"]["decoderParameters"] < plan["model"]["parameters"]
    [workers] = plan["workers"]
    assert (workers["workers"], workers["fits"]) == (4, True)
    assert workers["device"]["memoryBytes"] == 80_000_000_000
    assert workers["layout"] == {
        "zeroStage": 1,
        "microBatchSize": 12,
        "accumulation": 2,
        "gradientCheckpointing": False,
        "keptLayers": 0,
        "offloadActivations": False,
        "compile": False,
        "gatheredLayers": 0,
        "wholeGradients": False,
        "memoryCopies": 2,
        "peerCopy": True,
    }
    memory = workers["memoryPerWorker"]
    assert memory["optimizerBytes"] == 12 * 2_851_598_336 // 4
    assert memory["logitsOrRecomputationBytes"] < memory["reductionBytes"]
    activations = memory["activationsBytes"] + memory["reductionBytes"]
    others = ("weightsBytes", "gradientsBytes", "optimizerBytes", "buffersBytes", "runtimeBytes")
    assert memory["totalBytes"] == sum(memory[name] for name in others) + activations
    assert memory["hostBytes"] == memory["commitBytes"] == 3 * 12 * 2_851_598_336 // 4
    checkpoint = workers["checkpoint"]
    assert checkpoint["bytes"] == 12 * 2_851_598_336
    assert checkpoint["intervalSteps"] == round(checkpoint["intervalSeconds"] / 2)
    assert checkpoint["expectedStepsLostPerFailure"] == pytest.approx(checkpoint["intervalSeconds"] / 4)
    assert 0 < checkpoint["lostFraction"] < 1


def test_without_options_the_minimum_and_maximum_of_workers_are_planned(planner: Planner) -> None:
    planner.job(more="  workers: {count: 4, min: 2, gpus: 2}\n")
    plan = planner.json()

    assert [workers["workers"] for workers in plan["workers"]] == [4, 8]
    assert plan["workers"][0]["device"]["description"] == "a100-80gb, assumed (--device)"


def test_cpu_workers_share_this_machine(planner: Planner) -> None:
    planner.job("hf://google-t5/t5-small", more="  workers: {count: 2, gpus: 0}\n")
    one, two = planner.json("--workers", "1,2")["workers"]

    assert one["device"]["memoryBytes"] // 2 == two["device"]["memoryBytes"]
    assert planner.json("--device-memory", "4GB")["workers"][0]["device"]["memoryBytes"] == 4_000_000_000

    code, _, err = planner.run("--device", "h200")
    assert code == 2
    assert "workers have no GPUs" in err


def test_configuration_of_a_local_model_is_read_from_its_folder(planner: Planner) -> None:
    planner.job("model")
    code, _, err = planner.run()
    assert code == 20
    assert f"has no config.json, which the plan needs. Check the path ({HUB_HINT})" in err

    (planner.folder / "model").mkdir()
    (planner.folder / "model" / "config.json").write_text(json.dumps(KNOWN_CONFIGS["google-t5/t5-small"]))
    assert planner.json()["model"]["parameters"] == 60_506_624


def test_configuration_can_be_given_as_a_file(planner: Planner) -> None:
    planner.job("hf://me/my-model", task="causal", dataset="")
    file = planner.folder / "my-config.json"
    file.write_text(json.dumps(KNOWN_CONFIGS["openai-community/gpt2"]))

    assert planner.json("--config", str(file))["model"]["modelType"] == "gpt2"
    assert " of up to 512 tokens" in planner.run("--config", str(file))[1]


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_configuration_of_a_downloaded_model_is_read_from_the_cache_of_the_hub(
    variable: str, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(planner.folder))
    cache = planner.folder / {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
    model = cache / "models--me--my-model"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text("0123abc")
    (model / "snapshots/0123abc").mkdir(parents=True)
    (model / "snapshots/0123abc/config.json").write_text(json.dumps(KNOWN_CONFIGS["google-t5/t5-small"]))
    planner.job("hf://me/my-model")
    assert planner.json()["model"]["parameters"] == 60_506_624
    planner.job("hf://me/my-model", model=", revision: 0123abc")
    assert planner.json()["model"]["parameters"] == 60_506_624
    planner.job("hf://me/my-model", model=", revision: other")
    assert planner.run()[0] == 20


def test_unknown_remote_model_says_how_to_give_its_configuration(planner: Planner) -> None:
    planner.job("hf://me/my-model")
    code, out, err = planner.run()

    assert (code, out) == (20, "")
    assert "Download the model's config.json and pass it with --config FILE" in err


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [(None, 2, "cannot read the file"), ("{", 20, "invalid JSON"), ("[1]", 20, "expected a JSON object")],
)
def test_configuration_that_cannot_be_read_is_refused(
    planner: Planner, content: str | None, code: int, message: str
) -> None:
    file = planner.folder / "config.json"
    if content is not None:
        file.write_text(content)
    ended, _, err = planner.run("--config", str(file))

    assert ended == code
    assert message in err


def test_number_of_workers_that_is_too_small_is_explained_below_the_table(planner: Planner) -> None:
    planner.job("hf://google-t5/t5-11b")
    code, out, err = planner.run("--workers", "1,8")

    assert (code, err) == (0, "")
    assert "Workers 1: This t5 model does not fit on 1 worker with 85.0 GB each" in out
    unfit, fit = planner.json("--workers", "1,8")["workers"]
    assert (unfit["fits"], unfit["layout"], unfit["memoryPerWorker"]) == (False, None, None)
    assert fit["fits"]


def test_a_job_that_does_not_fit_is_rejected(planner: Planner) -> None:
    planner.job("hf://google-t5/t5-11b", model=", dtype: float32")
    code, out, err = planner.run("--workers", "1", "--device", "a100-40gb")

    assert code == 20
    assert "does not fit on 1 worker" in err
    assert "Workers 1:" not in out
    code, out, err = planner.run("--workers", "1", "--device", "a100-40gb", "--output", "json")
    assert json.loads(out)["workers"][0]["fits"] is False
    assert json.loads(err)["exitCode"] == 20


def test_a_device_without_fp8_is_refused_and_another_one_assumed(planner: Planner) -> None:
    planner.job("hf://meta-llama/Llama-3.1-8B", task="causal", dataset="", more="  execution: {precision: fp8}\n")
    code, _, err = planner.run("--workers", "8", "--device", "a100-80gb")
    assert code == 20
    assert "execution.precision: fp8 needs a GPU of compute capability 8.9 or higher, and a100-80gb has 8.0" in err
    plan = planner.json("--workers", "8")
    assert plan["workers"][0]["device"]["description"] == "h100-80gb, assumed (--device)"
    assert plan["workers"][0]["layout"]["compile"] is True


def test_layout_set_by_the_user_is_shown_with_a_warning_where_it_looks_too_large(planner: Planner) -> None:
    planner.job(more="  execution: {zeroStage: 1, microBatchSize: 90, gradientCheckpointing: false}\n")
    code, out, _ = planner.run("--workers", "1")

    assert code == 0
    assert "Workers 1: as set in execution; it may run out of memory" in " ".join(out.split())
    assert planner.json("--workers", "1")["workers"][0]["fits"] is False


def test_offloaded_states_are_shown_as_host_memory(planner: Planner) -> None:
    planner.job(more="  execution: {offload: optimizer}\n")

    assert "Host memory for offload" in planner.run()[1]
    assert planner.json("--workers", "1")["workers"][0]["memoryPerWorker"]["hostBytes"] == (12 + 2 * 12) * 2_851_598_336


def test_8bit_moments_take_a_quarter_and_commits_what_they_took(planner: Planner) -> None:
    whole = planner.json("--workers", "1")["workers"][0]["memoryPerWorker"]
    planner.file.write_text(planner.file.read_text().replace("epochs: 3", "epochs: 3, optimizer: adamw8bit"))
    memory = planner.json("--workers", "1")["workers"][0]["memoryPerWorker"]

    assert whole["optimizerBytes"] - memory["optimizerBytes"] == (8 - 2 - 8 / 256) * 2_851_598_336
    assert memory["hostBytes"] == whole["hostBytes"] == 2 * 12 * 2_851_598_336


@pytest.mark.parametrize(
    ("training", "bytes_per_parameter"),
    [("optimizer: adafactor", 4.03), ("optimizer: muon", 8.05), ("emaDecay: 0.999", 16.0)],
)
def test_checkpoints_have_the_states_of_the_optimizer(
    planner: Planner, training: str, bytes_per_parameter: float
) -> None:
    planner.file.write_text(planner.file.read_text().replace("epochs: 3", f"epochs: 3, {training}"))
    plan = planner.json("--workers", "4")["workers"][0]

    assert plan["checkpoint"]["bytes"] / 2_851_598_336 == pytest.approx(bytes_per_parameter, abs=0.03)
    assert plan["memoryPerWorker"]["optimizerBytes"] == pytest.approx(plan["checkpoint"]["bytes"] / 4, rel=1e-6)
    assert plan["memoryPerWorker"]["hostBytes"] == pytest.approx(3 * plan["checkpoint"]["bytes"] / 4, rel=1e-6)


def test_interval_of_the_job_is_used_where_it_sets_one(planner: Planner) -> None:
    planner.job(more="  checkpoint: {every: 300s}\n")
    assert planner.json()["workers"][0]["checkpoint"]["intervalSeconds"] == 300

    planner.job(more="  checkpoint: {every: 200}\n")
    untimed = planner.json()["workers"][0]["checkpoint"]
    assert (untimed["intervalSteps"], untimed["intervalSeconds"], untimed["lostFraction"]) == (200, None, None)
    assert planner.json("--step-seconds", "2")["workers"][0]["checkpoint"]["intervalSeconds"] == 400
    out = planner.run()[1]
    assert "200 steps" in out
    assert "200 steps" in planner.run("--step-seconds", "0.5")[1]


def test_documents_of_a_row_are_assumed(planner: Planner) -> None:
    assert planner.json()["assumed"]["documentsPerRow"] == 1
    planner.job(source="hf://mistralai/Mistral-7B-v0.1", task="causal", dataset=", packing: true")
    assert planner.json("--documents-per-row", "2.5")["assumed"]["documentsPerRow"] == 2.5


def test_documents_of_a_row_need_packing(planner: Planner) -> None:
    code, _, err = planner.run("--documents-per-row", "2")
    assert code != 0
    assert "--documents-per-row: the job packs no documents into a row: set dataset.packing: true" in err


def test_assumptions_move_the_interval(planner: Planner) -> None:
    def interval(*options: str) -> float:
        seconds: float = planner.json("--workers", "4", *options)["workers"][0]["checkpoint"]["intervalSeconds"]
        return seconds

    assert interval("--preemption-every", "1h") < interval() < interval("--preemption-every", "8h")
    assert interval("--storage-bandwidth", "2GB") < interval()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "0"], "expected whole numbers from 1"),
        (["--workers", "1,two"], "expected whole numbers from 1"),
        (["--device", "h200", "--device-memory", "80GB"], "set only one of them"),
        (["--device", "h300"], "did you mean h200"),
        (["--device-memory", "much"], "expected a size"),
        (["--preemption-every", "often"], "a duration such as"),
        (["--preemption-every", "0s"], "expected a duration longer than 0s"),
        (["--storage-bandwidth", "fast"], "--storage-bandwidth fast"),
    ],
)
def test_wrong_options_are_refused(planner: Planner, options: list[str], message: str) -> None:
    code, out, err = planner.run(*options)

    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
