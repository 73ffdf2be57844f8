"""Runs that keep the best checkpoint and stop early: at the same step, with the same export, however they are killed.

The loss of the evaluation falls up to step 8 and rises after it, because the model learns its few rows by heart.
Evaluations follow every second step, commits every fifth one and every evaluation that is the best so far.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spotune.job import FinetuneJob
from spotune.prompting.export_manifest import ExportManifest
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import list_generations, surviving_steps
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName, list_checkpoints
from spotune_trainer.checkpoint.reader import read_parameters
from spotune_trainer.data.loader import MicroBatches
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.notice import write_notice
from spotune_trainer.training.task import RankExit
from spotune_trainer.training.worker import TrainResult, Worker
from tests.trainer.support.groups import GroupFailedError
from tests.trainer.support.live import LiveRun, kill
from tests.trainer.support.preference import preference_job
from tests.trainer.support.runs import (
    MICRO_BATCH,
    Layout,
    Runs,
    committed,
    losses,
    sample_hashes,
    train_generation,
)

pytestmark = pytest.mark.slow

EVERY, PATIENCE = 2, 3
BEST, STOPPED = 8, 14
TWO = Layout(2, 1)
WEIGHTS = "model.safetensors"
REASON = f"stopped early after step {STOPPED}: loss has not improved in {PATIENCE} evaluations; best "


def make_job(runs: Runs, epochs: int = 8, rate: float = 0.08, **sections: Any) -> FinetuneJob:
    stopping = {"everySteps": EVERY, "best": {"metric": "loss"}, "earlyStopping": {"patience": PATIENCE}}
    training = {"learningRate": rate, "scheduler": "constant", "warmupSteps": 0, "epochs": epochs}
    return runs.job(
        dataset={"eval": {"fraction": 0.2, "seed": 1}},
        training=training | {"evaluation": stopping | sections.pop("evaluation", {})},
        checkpoint={"keep": 1},
        **sections,
    )


def evaluations(directory: JobDirectory) -> list[dict[str, Any]]:
    """Events of all evaluations of all generations, in the order of their time."""
    logs = [directory.generation_logs(generation.number) for generation in list_generations(directory)]
    return [event for log in logs for event in files.read_lines(log.events) if event["event"] == "evaluated"]


def expected_stop(values: dict[int, float]) -> tuple[int, int]:
    """Best step and stop step of losses by step, from their definition."""
    for step in sorted(values):
        seen = {each: loss for each, loss in values.items() if each <= step}
        best = min(seen, key=lambda each: seen[each])
        if sum(each > best for each in seen) >= PATIENCE:
            return best, step
    raise AssertionError("no step stops the run")


def exported(directory: JobDirectory) -> bytes:
    return (directory.export / WEIGHTS).read_bytes()


def kept(directory: JobDirectory) -> list[int]:
    return [each.name.step for each in list_checkpoints(directory.checkpoints) if isinstance(each, Checkpoint)]


def equals_checkpoint(export: Path, directory: JobDirectory, step: int) -> bool:
    """Whether exported weights are those of the checkpoint of a step."""
    parameters = read_parameters(committed(directory, step))
    weights = load_file(export / WEIGHTS)
    shared = [name for name in weights if name in parameters]
    assert len(shared) > 5
    return all(torch.equal(weights[name], parameters[name]) for name in shared)


Finished = tuple[JobDirectory, TrainResult]


@pytest.fixture(scope="module")
def undisturbed(runs: Runs) -> Finished:
    directory = runs.empty("finished-stopped-early")
    return directory, train_generation(directory, make_job(runs), TWO)


def test_run_stops_at_the_step_that_its_records_say(undisturbed: Finished) -> None:
    directory, result = undisturbed
    values = {event["step"]: event["loss"] for event in evaluations(directory)}
    assert list(values) == list(range(EVERY, STOPPED + 1, EVERY)), "the last evaluation is not repeated"
    assert expected_stop(values) == (BEST, STOPPED)
    assert result.exit is RankExit.TRAINED
    assert len(losses(directory)) == result.summary["steps"] == STOPPED
    assert result.summary["best"] == {"step": BEST, "metric": "loss", "value": values[BEST]}
    assert result.summary["stoppedEarly"] == f"{REASON}{values[BEST]:.6g} after step {BEST}"
    assert result.summary["evalLoss"] == values[BEST], "the results are those of the exported model"
    assert result.summary["exportProblem"] is None


def test_best_checkpoint_is_kept_and_exported(undisturbed: Finished) -> None:
    directory, result = undisturbed
    assert kept(directory) == [BEST, STOPPED], "keep is 1"
    assert equals_checkpoint(directory.export, directory, BEST)
    assert not equals_checkpoint(directory.export, directory, STOPPED)
    assert result.summary["exportStep"] == BEST
    progress = files.read_json(directory.generation_logs(1).progress)
    assert progress is not None
    assert progress["best"]["step"] == progress["exportStep"] == BEST
    assert ExportManifest.read(directory.export).step == BEST
    assert progress["stoppedEarly"] == result.summary["stoppedEarly"]
    assert progress["evalLoss"] == result.summary["evalLoss"]
    assert progress["evalStep"] == BEST, "of the evaluation that the scores are of"


class KilledBeforeEvaluation(Worker):
    """Dies when step 10 is committed, but not evaluated yet."""

    def _evaluate_if_due(self, step: int) -> bool:
        if step == 10:
            self.checkpointing.finish_commit()
            os._exit(9)
        return super()._evaluate_if_due(step)


class KilledBeforeCommit(Worker):
    """Dies when the evaluation after step 8 was the best, but its checkpoint is not committed."""

    def commit(self, step: int) -> None:
        if step == BEST:
            os._exit(9)
        super().commit(step)


class KilledBetween(Worker):
    """Dies in step 13, after two evaluations without improvement. The last commit is that of step 10."""

    def batches(self) -> Generator[MicroBatches]:
        for step, batches in enumerate(super().batches(), start=self.context.first_step + 1):
            if step == 13:
                os._exit(9)
            yield batches


class KilledBeforeExport(Worker):
    """Dies after it has stopped early, before the export."""

    def final_checkpoint(self) -> CheckpointName:
        os._exit(9)


def killed_run(runs: Runs, worker: type[Worker], layout: Layout = TWO) -> JobDirectory:
    directory = runs.empty("killed")
    with pytest.raises(GroupFailedError, match="status 9"):
        train_generation(directory, make_job(runs), layout, worker)
    return directory


@pytest.mark.parametrize(
    "worker",
    [
        pytest.param(KilledBeforeEvaluation, marks=pytest.mark.long),
        KilledBeforeCommit,
        pytest.param(KilledBetween, marks=pytest.mark.long),
        KilledBeforeExport,
    ],
)
def test_killed_run_stops_at_the_same_step_with_the_same_bits(
    runs: Runs, undisturbed: Finished, worker: type[Worker]
) -> None:
    expected, result = undisturbed
    directory = killed_run(runs, worker)
    resumed = train_generation(directory, make_job(runs), TWO)
    assert losses(directory) == losses(expected)
    fields = ("best", "stoppedEarly", "steps", "exportStep", "exportSha256", "evalLoss")
    assert [resumed.summary[name] for name in fields] == [result.summary[name] for name in fields]
    assert exported(directory) == exported(expected)
    assert kept(directory) == [BEST, STOPPED]


@pytest.mark.long
@pytest.mark.parametrize(
    ("worker", "after"),
    [(KilledBeforeEvaluation, Layout(3, 2)), (KilledBetween, Layout(1, 0)), (KilledBeforeExport, Layout(3, 3))],
)
def test_run_resumed_at_another_world_size_stops_at_the_same_step(
    runs: Runs, undisturbed: Finished, worker: type[Worker], after: Layout
) -> None:
    """The best step was committed before the kill, so the exported bits are the same as well."""
    expected, _ = undisturbed
    directory = killed_run(runs, worker)
    resumed = train_generation(directory, make_job(runs), after)
    assert (resumed.summary["steps"], resumed.summary["best"]["step"]) == (STOPPED, BEST)
    assert sample_hashes(directory) == sample_hashes(expected)
    assert exported(directory) == exported(expected)


def test_evaluation_that_the_kill_prevented_is_made_before_the_next_step(runs: Runs) -> None:
    directory = killed_run(runs, KilledBeforeEvaluation)
    assert [event["step"] for event in evaluations(directory)] == [2, 4, 6, 8]
    train_generation(directory, make_job(runs), TWO)
    assert [event["step"] for event in evaluations(directory)] == [2, 4, 6, 8, 10, 12, 14]


def test_stop_notice_at_an_evaluation_loses_no_evaluation(runs: Runs) -> None:
    directory = runs.empty("noticed")
    write_notice(directory.notice, seconds=30, stop=True, reason="spot")
    assert train_generation(directory, make_job(runs), TWO).exit is RankExit.STOPPED
    directory.notice.unlink()
    resumed = train_generation(directory, make_job(runs), TWO)
    assert [event["step"] for event in evaluations(directory)] == list(range(EVERY, STOPPED + 1, EVERY))
    assert resumed.summary["steps"] == STOPPED


@pytest.mark.long
def test_same_job_again_does_not_train_further(runs: Runs) -> None:
    directory = killed_run(runs, KilledBeforeExport)
    steps = surviving_steps(directory)
    for _ in range(2):
        resumed = train_generation(directory, make_job(runs), TWO)
        assert surviving_steps(directory) == steps
        assert resumed.summary["stoppedEarly"].startswith(REASON)
    assert kept(directory) == [BEST, STOPPED]


def test_longer_run_continues_for_at_least_its_patience(runs: Runs) -> None:
    """Growing `epochs` asks for more. What the run has to beat stays."""
    directory = runs.empty("longer")
    train_generation(directory, make_job(runs), TWO)
    resumed = train_generation(directory, make_job(runs, epochs=9), TWO)
    assert [event["step"] for event in evaluations(directory)][-PATIENCE:] == [16, 18, 20]
    assert resumed.summary["steps"] == 20
    assert resumed.summary["best"]["step"] == BEST
    assert equals_checkpoint(directory.export, directory, BEST)


@pytest.mark.parametrize("damage", [pytest.param("changed", marks=pytest.mark.long), "lost"])
def test_lost_best_checkpoint_is_reported_and_the_next_best_exported(runs: Runs, damage: str) -> None:
    directory = killed_run(runs, KilledBeforeExport)
    path = committed(directory, BEST).path / "rank-00000.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-9] + bytes(9)) if damage == "changed" else path.unlink()
    resumed = train_generation(directory, make_job(runs), TWO)
    assert resumed.summary["best"]["step"] == BEST
    assert resumed.summary["exportStep"] == STOPPED
    problem = resumed.summary["exportProblem"]
    assert problem.startswith(f"the checkpoint of step {BEST} is damaged: rank-00000.safetensors")
    assert problem.endswith(f"; the next best is exported, of step {STOPPED}")
    assert resumed.summary["evalLoss"] == evaluations(directory)[-1]["loss"]
    assert equals_checkpoint(directory.export, directory, STOPPED)
    reported = [
        event for event in files.read_lines(directory.generation_logs(2).events) if "unusable" in event["event"]
    ]
    assert [event["reason"] for event in reported] == [problem]


@pytest.mark.long
def test_last_step_is_exported_on_request(runs: Runs) -> None:
    directory = runs.empty("last")
    result = train_generation(directory, make_job(runs, output={"export": "last"}), TWO)
    assert (result.summary["best"]["step"], result.summary["exportStep"]) == (BEST, STOPPED)
    assert equals_checkpoint(directory.export, directory, STOPPED)
    assert result.summary["evalLoss"] == evaluations(directory)[-1]["loss"]


@pytest.mark.long
def test_best_of_a_run_that_does_not_stop_early_may_be_its_last_step(runs: Runs) -> None:
    directory = runs.empty("whole")
    job = make_job(runs, epochs=2, evaluation={"earlyStopping": None})
    result = train_generation(directory, job, Layout(1, 0))
    steps = result.summary["steps"]
    values = {event["step"]: event["loss"] for event in evaluations(directory)}
    assert min(values, key=lambda step: values[step]) == BEST == steps
    assert (result.summary["best"]["step"], result.summary["exportStep"]) == (steps, steps)
    assert result.summary["stoppedEarly"] is None
    assert equals_checkpoint(directory.export, directory, steps)


@pytest.mark.long
def test_best_adapter_is_exported(runs: Runs) -> None:
    directory = runs.empty("adapter")
    job = make_job(runs)
    spec = job.spec.model_dump(mode="json", exclude_unset=True) | {"adapter": {"lora": {"r": 2, "dropout": 0.0}}}
    adapted = FinetuneJob.model_validate({**job.model_dump(mode="json", exclude_unset=True), "spec": spec})
    result = train_generation(directory, adapted, TWO)
    best = result.summary["best"]["step"]
    assert result.summary["exportStep"] == best
    assert best in kept(directory)


@pytest.mark.long
def test_pairs_stop_early_by_the_share_that_is_ranked_right_although_the_loss_still_falls(
    runs: Runs, tmp_path: Path
) -> None:
    evaluation = {"everySteps": EVERY, "best": {"metric": "rewardAccuracy"}, "earlyStopping": {"patience": PATIENCE}}
    job = preference_job(tmp_path, "dpo", dataset={"eval": {"fraction": 0.25}}, training={"evaluation": evaluation})
    directory = runs.empty("rewards")
    result = train_generation(directory, job, TWO)
    events = evaluations(directory)
    best, stopped = expected_stop({event["step"]: -event["scores"]["rewardAccuracy"] for event in events})
    assert events[-1]["step"] == len(losses(directory)) == stopped
    value = next(event["scores"]["rewardAccuracy"] for event in events if event["step"] == best)
    assert result.summary["best"] == {"step": best, "metric": "rewardAccuracy", "value": value}
    assert "rewardAccuracy has not improved in 3 evaluations" in result.summary["stoppedEarly"]
    assert result.summary["exportStep"] == best
    assert equals_checkpoint(directory.export, directory, best)
    assert [event["loss"] for event in events] == sorted((event["loss"] for event in events), reverse=True)


@pytest.fixture
def live(runs: Runs) -> Iterator[LiveRun]:
    """A run of two workers that stops early after tens of steps, to be killed in between."""
    sections: dict[str, Any] = {
        "execution": {"zeroStage": TWO.zero_stage, "microBatchSize": MICRO_BATCH},
        "workers": {"count": TWO.world_size, "gpus": 0},
        "retry": {"backoff": {"initial": "500ms", "max": "1s"}},
    }
    job = make_job(runs, epochs=60, rate=0.02, evaluation={"earlyStopping": {"patience": 10}}, **sections)
    run = LiveRun(runs.empty("live-stopped-early"), job)
    yield run
    run.clean_up()


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(600)
def test_live_run_with_a_killed_worker_stops_at_the_same_step_with_the_same_bits(runs: Runs, live: LiveRun) -> None:
    undisturbed = runs.empty("undisturbed-stopped-early")
    expected = train_generation(undisturbed, live.job, TWO, timeout=300).summary
    assert expected["stoppedEarly"] is not None
    best = expected["best"]["step"]
    live.start()
    live.wait_for_step(best + EVERY)
    kill(live.workers()[0])
    code, output = live.wait()

    assert code == 0, output
    assert [event["cause"] for event in live.events("failure")] == ["workerLost"]
    restarted = list_generations(live.directory)[-1].restored
    assert restarted is not None
    assert best <= restarted.step < expected["steps"], "it goes on while it waits for an improvement"
    fields = ("best", "stoppedEarly", "steps", "exportStep", "exportSha256", "evalLoss")
    assert [live.result()[name] for name in fields] == [expected[name] for name in fields]
    assert losses(live.directory) == losses(undisturbed)
    assert sample_hashes(live.directory) == sample_hashes(undisturbed)
