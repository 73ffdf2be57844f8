"""A run that starts from an imported checkpoint continues as if it had trained the earlier steps itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spotune.errors import JobError, UsageError
from spotune_trainer.checkpoint.generations import choose_checkpoint, claim, surviving_steps
from spotune_trainer.export.import_universal import import_universal_checkpoint
from spotune_trainer.export.universal import write_universal
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.runs import (
    STEPS,
    STEPS_PER_EPOCH,
    Layout,
    Runs,
    committed,
    committed_state,
    losses,
    sample_hashes,
    train_generation,
)

pytestmark = pytest.mark.slow

LAYOUT = Layout(2, 1)


@pytest.fixture(scope="module")
def universal(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's checkpoint after its first epoch, in the universal format."""
    folder = tmp_path_factory.mktemp("universal") / "step-5"
    write_universal(committed(runs.finished(LAYOUT), STEPS_PER_EPOCH), folder)
    return folder


def test_training_continues_bit_for_bit_from_an_imported_checkpoint(runs: Runs, universal: Path) -> None:
    undisturbed, directory = runs.finished(LAYOUT), runs.empty("begun-from-universal")
    import_universal_checkpoint(directory, runs.job(), universal)
    train_generation(directory, runs.job(), LAYOUT)
    assert [record["step"] for record in surviving_steps(directory)] == list(range(STEPS_PER_EPOCH + 1, STEPS + 1))
    assert losses(directory) == losses(undisturbed)[STEPS_PER_EPOCH:]
    assert sample_hashes(directory) == sample_hashes(undisturbed)[STEPS_PER_EPOCH:]
    found, expected = committed_state(directory, STEPS), committed_state(undisturbed, STEPS)
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


def test_the_imported_checkpoint_has_generation_0(runs: Runs, universal: Path) -> None:
    directory = runs.empty("generation-0")
    manifest = import_universal_checkpoint(directory, runs.job(), universal)
    chosen = choose_checkpoint(directory).checkpoint
    assert chosen is not None
    assert str(chosen.name) == "step-00000005.gen-0"
    assert chosen.manifest == manifest
    assert (manifest.optimizer_step, manifest.world_size) == (STEPS_PER_EPOCH, 1)
    assert manifest.parameters == committed(runs.finished(LAYOUT), STEPS_PER_EPOCH).manifest.parameters


def test_import_into_a_started_run_is_rejected(runs: Runs, universal: Path) -> None:
    claimed = runs.empty("claimed")
    claim(claimed, None)
    for begun in (claimed, runs.finished(LAYOUT)):
        before = sorted(begun.root.rglob("*"))
        with pytest.raises(UsageError, match="has already started"):
            import_universal_checkpoint(begun, runs.job(), universal)
        assert sorted(begun.root.rglob("*")) == before


def test_a_checkpoint_of_another_model_leaves_the_run_unchanged(runs: Runs, universal: Path) -> None:
    directory = runs.empty("another-model")
    with pytest.raises(JobError, match=r"fp32\.pt is missing: the checkpoint is incomplete, or of another model"):
        import_universal_checkpoint(directory, runs.job("causal"), universal)
    assert list(directory.root.iterdir()) == []


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"optimizer": "muon"}, "has AdamW's moments, but training.optimizer is muon"),
        ({"emaDecay": 0.9}, r"training\.emaDecay: a universal checkpoint has no moving average"),
    ],
)
def test_states_that_the_format_does_not_have_are_refused(
    runs: Runs, universal: Path, training: dict[str, Any], message: str
) -> None:
    directory = runs.empty("other-states")
    with pytest.raises(JobError, match=message):
        import_universal_checkpoint(directory, runs.job(training=training), universal)
    assert list(directory.root.iterdir()) == []


def test_an_interrupted_import_leaves_the_run_unchanged(runs: Runs, universal: Path) -> None:
    directory = runs.empty("stopped")

    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_universal_checkpoint(JobDirectory(directory.root), runs.job(), universal, stop)
    assert choose_checkpoint(directory).checkpoint is None
    import_universal_checkpoint(directory, runs.job(), universal)
