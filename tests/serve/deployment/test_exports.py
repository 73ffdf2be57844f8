"""A version of a model keeps its own weights while its job is trained further."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from spotune.errors import JobError
from spotune.prompting.export_manifest import MANIFEST, ExportManifest
from spotune_serve.deployment.exports import export_folder, load_export


def write_export(folder: Path, step: int | None) -> Path:
    """A folder with a manifest, and the step as its weights."""
    folder.mkdir()
    manifest = asdict(ExportManifest("a", "causal", "", "", max_length=8, max_new_tokens=8, step=step))
    (folder / MANIFEST).write_text(json.dumps(manifest))
    (folder / "weights").write_text(str(step))
    return folder


def weights(folder: Path) -> str:
    return (folder / "weights").read_text()


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """The export of step 900, which the trainer has replaced by that of step 1800."""
    write_export(tmp_path / "previous-export-step-900", 900)
    return write_export(tmp_path / "export", 1800)


def test_each_version_has_its_own_folder(export: Path) -> None:
    assert export_folder(export, 1800) == export
    assert export_folder(export, 900).name == "previous-export-step-900"
    assert export_folder(export, None) == export


def test_the_kept_export_is_found_between_the_two_renames_of_the_trainer(export: Path) -> None:
    shutil.rmtree(export)
    assert export_folder(export, 900).name == "previous-export-step-900"


def test_a_version_whose_export_was_deleted_is_named(export: Path) -> None:
    with pytest.raises(
        JobError, match=r"step 300 is gone: .*export has the export of step 1800, .*-step-300 beside it"
    ):
        export_folder(export, 300)
    with pytest.raises(JobError, match="does not exist"):
        export_folder(export.with_name("nowhere"), 300)


def test_a_kept_folder_of_another_step_is_not_served(export: Path) -> None:
    export.with_name("previous-export-step-900").rename(export.with_name("previous-export-step-300"))
    with pytest.raises(JobError, match="step 300 is gone"):
        export_folder(export, 300)


def test_an_export_of_an_older_version_has_no_step_and_is_served(tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export", None)
    assert export_folder(folder, 900) == folder


@pytest.mark.parametrize("fails", [False, True], ids=["mixed files", "missing file"])
def test_an_export_that_is_replaced_while_it_is_loaded_is_loaded_again(tmp_path: Path, fails: bool) -> None:
    folder = write_export(tmp_path / "export", 900)
    loaded: list[str] = []

    def load(path: Path) -> str:
        if not loaded:  # the trainer replaces the export now
            folder.rename(tmp_path / "previous-export-step-900")
            write_export(folder, 1800)
            if fails:
                loaded.append("")
                raise FileNotFoundError(path)
        loaded.append(weights(path))
        return loaded[-1]

    assert load_export(folder, 900, load) == "900"
    assert loaded == ["" if fails else "1800", "900"]


def test_an_export_that_cannot_be_loaded_is_not_tried_for_ever(export: Path) -> None:
    def load(path: Path) -> str:
        raise JobError("damaged")

    with pytest.raises(JobError, match="damaged"):
        load_export(export, 1800, load)
