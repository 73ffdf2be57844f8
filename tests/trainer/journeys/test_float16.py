"""float16: the loss scale adapts, is saved in the checkpoint, and is the same after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.training.worker import Worker
from tests.trainer.support.groups import GroupFailedError
from tests.trainer.support.runs import STEPS, Layout, Runs, committed, committed_state, losses, train_generation

pytestmark = pytest.mark.slow

EVERY_STEP = {"every": 1, "keep": 20}


class Float16Worker(Worker):
    """Trains in float16 on a CPU without support for it, from a loss scale at which gradients overflow."""

    def set_up(self) -> None:
        CPU_Accelerator.is_fp16_supported = lambda _: True
        super().set_up()
        self.context.engine.optimizer.loss_scaler.cur_scale = 2.0**26

    def commit(self, step: int) -> None:
        """Wait for each commit, so that none is skipped while another one is being written."""
        super().commit(step)
        self.checkpointing.finish_commit()


SCHEDULE_FREE = {"optimizer": "schedule_free_adamw", "scheduler": "constant_with_warmup"}
LONG = pytest.mark.long
CASES = [
    pytest.param({}, Layout(2, 1), id="adamw, stage 1"),
    pytest.param({}, Layout(2, 3), id="adamw, stage 3"),
    pytest.param({"emaDecay": 0.9}, Layout(2, 3), id="EMA, stage 3", marks=LONG),
    pytest.param({"optimizer": "muon", "emaDecay": 0.9}, Layout(2, 2), id="muon with EMA, stage 2", marks=LONG),
    pytest.param({"optimizer": "adafactor"}, Layout(2, 1), id="adafactor, stage 1", marks=LONG),
    pytest.param(SCHEDULE_FREE, Layout(2, 2), id="schedule_free_adamw, stage 2", marks=LONG),
    pytest.param(SCHEDULE_FREE, Layout(2, 3), id="schedule_free_adamw, stage 3", marks=LONG),
]


@pytest.mark.parametrize(("training", "layout"), CASES)
def test_restart_changes_neither_loss_scale_nor_weights(runs: Runs, training: dict[str, Any], layout: Layout) -> None:
    job = runs.job("causal", "float16", checkpoint=EVERY_STEP, training={"maxBadSteps": 1, **training})
    undisturbed = runs.empty("float16")
    train_generation(undisturbed, job, layout, Float16Worker)
    skipped = [record["step"] for record in surviving_steps(undisturbed) if record["skipped"]]
    assert skipped[:3] == [1, 2, 3], "more skipped steps in a row than maxBadSteps allows"
    assert len(skipped) < STEPS
    assert all(loss > 0 for loss in losses(undisturbed))
    scales = [committed(undisturbed, step).manifest.loss_scale for step in range(1, STEPS + 1)]
    assert [scale["scale"] for scale in scales if scale][-1] == 2.0 ** (
        26 - len(skipped) + 1
    )  # the first overflow does not lower the scale

    resumed = runs.interrupted(undisturbed, 2)
    train_generation(resumed, job, layout, Float16Worker)
    assert losses(resumed) == losses(undisturbed)
    assert committed(resumed, STEPS).manifest.loss_scale == scales[-1]
    expected, found = committed_state(undisturbed, STEPS), committed_state(resumed, STEPS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_nonfinite_loss_is_a_bad_step_in_float16_too(runs: Runs) -> None:
    job = runs.job("causal", "float16", training={"maxBadSteps": 1, "learningRate": 1e9, "warmupSteps": 0})
    with pytest.raises(GroupFailedError, match=r"training: the loss of step \d+ is nan"):
        train_generation(runs.empty("float16"), job, Layout(1, 1), Float16Worker)


def test_float16_is_rejected_on_a_device_without_it(runs: Runs, tmp_path: Path) -> None:
    if torch.cuda.is_available() or CPU_Accelerator().is_fp16_supported():
        pytest.skip("this device supports float16")
    with pytest.raises(GroupFailedError, match=r"model\.dtype: float16 needs a GPU"):
        train_generation(runs.empty("float16"), runs.job("causal", "float16"), Layout(1, 1))
