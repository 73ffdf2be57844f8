"""Code of the user from git, archives and ConfigMaps: read once, pinned, and refused with the reason."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from spotune.errors import InfrastructureError, JobError, UsageError
from spotune.job import FinetuneJob
from spotune_trainer.driver.planning import plan_run
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.preflight.admission import check_directory
from spotune_trainer.supervisor.preflight.sources import check_user_code
from spotune_trainer.training.task import RankExit
from spotune_trainer.user_code.fetch import fetch_code, with_code
from tests.trainer.training_functions import functions
from tests.trainer.training_functions.ranks import run_generation
from tests.trainer.user_code.git_server import REPOSITORY, make_repository, push, served

FUNCTIONS = Path(functions.__file__).parent
TRAIN = "def train(config):\n    pass\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this node alone."""
    monkeypatch.setenv("SPOTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GIT_TOKEN", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    found = JobDirectory(tmp_path / "run")
    found.root.mkdir()
    return found


def job_from(function: str = "train:train", **code_from: Any) -> FinetuneJob:
    training = {"function": function, "codeFrom": code_from}
    spec = {"training": training, "workers": {"count": 2, "gpus": 0}}
    return FinetuneJob.model_validate({"metadata": {"name": "own"}, "spec": spec})


def code_of(job: FinetuneJob, directory: JobDirectory) -> Path:
    """Folder with the code, after it was read as by a driver."""
    return Path(with_code(job, directory, fetch_code(job, directory)).spec.training.code)


class TestGit:
    def test_a_branch_that_moves_does_not_change_the_code(self, tmp_path: Path, directory: JobDirectory) -> None:
        first, second = make_repository(tmp_path, {"train.py": TRAIN}, {"train.py": TRAIN + "# second\n"})
        repository = tmp_path / REPOSITORY
        job = job_from(git={"url": f"file://{repository}", "revision": "main"})
        assert fetch_code(job, directory) == second
        third = push(tmp_path, {"train.py": TRAIN + "# third\n"})
        assert plan_run(job, directory, None, lambda: 0).code == second
        moved = job_from(git={"url": f"file://{repository}"})  # another text: HEAD in place of main
        assert fetch_code(moved, directory) == third
        pinned = job_from(git={"url": f"file://{repository}", "revision": first[:10]})
        assert fetch_code(pinned, directory) == first
        assert (code_of(pinned, directory) / "train.py").read_text() == TRAIN
        shutil.rmtree(repository)
        assert fetch_code(pinned, directory) == first
        assert not (code_of(pinned, directory) / ".git").exists()

    def test_a_folder_within_the_repository(self, tmp_path: Path, directory: JobDirectory) -> None:
        make_repository(tmp_path, {"src/train.py": TRAIN, "run.sh": "#!/bin/sh\n"})
        url = f"file://{tmp_path / REPOSITORY}"
        job = job_from(git={"url": url}, directory="src")
        assert check_user_code(job, directory).endswith(f"of {url} has train:train")
        with pytest.raises(JobError, match=r"codeFrom\.directory: commit .* has no folder other: correct it"):
            code_of(job_from(git={"url": url}, directory="other"), directory)

    def test_a_token_is_sent_and_not_shown(
        self, tmp_path: Path, directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (commit,) = make_repository(tmp_path, {"train.py": TRAIN})
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
        with served(tmp_path, token="secret-token") as url:
            job = job_from(git={"url": url})
            with pytest.raises(JobError, match=r"could not read Username.*tokenSecretRef; on one machine \$GIT_TOKEN"):
                fetch_code(job, directory)
            monkeypatch.setenv("GIT_TOKEN", "wrong")
            with pytest.raises(JobError, match=r"[Aa]uthentication failed") as refused:
                fetch_code(job, directory)
            assert "wrong" not in str(refused.value)
            monkeypatch.setenv("GIT_TOKEN", "secret-token")
            assert fetch_code(job, directory) == commit
        assert b"secret-token" not in directory.code(commit).read_bytes()

    def test_what_is_not_there_is_named(self, tmp_path: Path, directory: JobDirectory) -> None:
        make_repository(tmp_path, {"train.py": TRAIN})
        url = f"file://{tmp_path / REPOSITORY}"
        with pytest.raises(JobError, match=r"has no revision v9: correct training\.codeFrom\.git\.revision"):
            fetch_code(job_from(git={"url": url, "revision": "v9"}), directory)
        with pytest.raises(JobError, match=r"not appear to be a git repository.*correct url and revision"):
            fetch_code(job_from(git={"url": f"file://{tmp_path}/other.git"}), directory)
        with pytest.raises(JobError, match=r"training\.function: train:other: .*has no"):
            plan_run(job_from("train:other", git={"url": url}), directory, None, lambda: 0)

    def test_a_server_that_does_not_answer_is_asked_again(self, directory: JobDirectory) -> None:
        with pytest.raises(InfrastructureError, match=r"127\.0\.0\.1"):
            fetch_code(job_from(git={"url": "http://127.0.0.1:9/training.git"}), directory)

    def test_without_git_the_remedy_is_named(self, directory: JobDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(JobError, match=r"git is not installed where the trainer runs: install it in the image"):
            fetch_code(job_from(git={"url": "https://example.com/a.git"}), directory)


class TestArchive:
    @pytest.mark.parametrize("name", ["code.tar.gz", "code.zip"])
    def test_an_archive_is_read_once(self, tmp_path: Path, directory: JobDirectory, name: str) -> None:
        path = tmp_path / name
        (tmp_path / "train.py").write_text(TRAIN)
        if name.endswith("zip"):
            with zipfile.ZipFile(path, "w") as archive:
                archive.write(tmp_path / "train.py", "own/train.py")
        else:
            with tarfile.open(path, "w:gz") as packed:
                packed.add(tmp_path / "train.py", "own/train.py")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        job = job_from(archive={"source": str(path), "sha256": digest}, directory="own")
        assert fetch_code(job, directory) == digest
        path.unlink()
        assert (code_of(job, directory) / "train.py").read_text() == TRAIN

    def test_another_file_is_refused(self, tmp_path: Path, directory: JobDirectory) -> None:
        path = tmp_path / "code.tar"
        path.write_bytes(b"no archive")
        with pytest.raises(JobError, match=r"archive\.source: .*code\.tar cannot be unpacked"):
            fetch_code(job_from(archive={"source": str(path)}), directory)
        with pytest.raises(JobError, match=r"archive\.sha256: .*code\.tar has [0-9a-f]{64}: correct it"):
            fetch_code(job_from(archive={"source": str(path), "sha256": "0" * 64}), directory)
        with pytest.raises(JobError, match=r"archive\.source: there is no file /nowhere/code\.zip"):
            fetch_code(job_from(archive={"source": "/nowhere/code.zip"}), directory)

    def test_members_outside_of_the_folder_are_refused(self, tmp_path: Path, directory: JobDirectory) -> None:
        with tarfile.open(tmp_path / "code.tar", "w") as archive:
            (tmp_path / "train.py").write_text(TRAIN)
            archive.add(tmp_path / "train.py", "../outside.py")
        with pytest.raises(JobError, match=r"cannot be unpacked.*outside"):
            fetch_code(job_from(archive={"source": str(tmp_path / "code.tar")}), directory)


class TestConfigMap:
    def mount(self, folder: Path, version: str, text: str) -> None:
        """Put files there as a kubelet does: a link to a folder, which is replaced as a whole."""
        (folder / f"..{version}").mkdir(parents=True)
        (folder / f"..{version}" / "train.py").write_text(text)
        (folder / "new").symlink_to(f"..{version}")
        (folder / "new").replace(folder / "..data")

    def test_a_change_is_the_code_of_the_next_group(
        self, tmp_path: Path, directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mounted, job = tmp_path / "mounted", job_from(configMap={"name": "own-code"})
        mounted.mkdir()
        monkeypatch.setenv("SPOTUNE_CODE_CONFIG_MAP", str(mounted))
        with pytest.raises(JobError, match="there is no ConfigMap own-code with files in the job's namespace"):
            fetch_code(job, directory)
        self.mount(mounted, "1", TRAIN)
        first = fetch_code(job, directory)
        self.mount(mounted, "2", TRAIN + "# second\n")
        second = fetch_code(job, directory)
        assert first != second
        assert (code_of(job, directory) / "train.py").read_text() == TRAIN + "# second\n"
        shutil.rmtree(mounted)
        mounted.mkdir()
        assert fetch_code(job, directory) == second, "a started run needs the ConfigMap no more"

    def test_one_machine_has_none(self, directory: JobDirectory) -> None:
        with pytest.raises(JobError, match=r"configMap needs a cluster: on one machine, set training\.code"):
            fetch_code(job_from(configMap={"name": "own-code"}), directory)


def test_a_directory_whose_preflight_has_read_the_code_is_that_of_a_new_job(
    tmp_path: Path, directory: JobDirectory
) -> None:
    make_repository(tmp_path, {"train.py": TRAIN})
    job = job_from(git={"url": f"file://{tmp_path / REPOSITORY}"})
    check_user_code(job, directory)
    check_directory(directory, job)
    (directory.root / "notes.txt").touch()
    with pytest.raises(UsageError, match="holds other files and no job"):
        check_directory(directory, job)


@pytest.mark.slow
def test_a_lost_group_continues_with_its_commit_when_the_repository_is_gone(
    tmp_path: Path, directory: JobDirectory
) -> None:
    (commit,) = make_repository(tmp_path, {"src/functions.py": (FUNCTIONS / "functions.py").read_text()})
    training = {
        "function": "functions:adds_up",
        "codeFrom": {"git": {"url": f"file://{tmp_path / REPOSITORY}"}, "directory": "src"},
        "config": {"steps": 6, "every": 2, "killAt": 5},
    }
    spec = {"training": training, "workers": {"count": 2, "gpus": 0}}
    job = FinetuneJob.model_validate({"metadata": {"name": "own"}, "spec": spec})
    _, results = run_generation(directory, job)
    assert results[1] == -9
    shutil.rmtree(tmp_path / REPOSITORY)
    shutil.rmtree(tmp_path / "cache")  # as on another node
    task, results = run_generation(directory, job)
    assert [result[0] for result in results] == [RankExit.TRAINED] * 2
    assert (task.restore, task.plan["code"]) == ("step-00000004.gen-1", commit)
    assert json.loads((directory.export / "state.json").read_text()) == {"step": 6, "total": 63.0}
