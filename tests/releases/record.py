"""Records what a release writes, for the tests that a newer version reads it (tests/releases/README.md).

python -m tests.releases.record --release v0.1.0                     # at the tag of that name
python -m tests.releases.record --release before-v0.1.0 --revision 5a2906d3

It takes four minutes, and replaces tests/releases/recorded/RELEASE.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests import ROOT
from tests.releases.definitions import Schema, schemas, with_defaults
from tests.releases.release import INPUTS, NUMERICS, RELEASES, check_out

_RECORDING = Path(__file__).parent / "recording"
_PACKAGES = ("api", "client", "operator", "trainer", "serve", "tests/cluster/src", "")
_SPECS = 1000
_PROVIDERS = ("aks", "gke", "eks", "none")


def bodies(code: Path, schema: dict[str, Schema]) -> list[dict[str, Any]]:
    """The examples and the jobs of the golden files of a release, as its API server stores them."""
    found = []
    for file in sorted(code.glob("examples/*/*.yaml")):
        found += [each for each in _documents(file) if each.get("kind") in ("FinetuneJob", "ModelService")]
    for file in sorted(code.glob("tests/operator/reconcile/golden/job-*.yaml")):
        for provider in _PROVIDERS:
            (job,) = _documents(file)
            job["metadata"]["name"] += f"-{provider}"
            job["spec"].setdefault("cluster", {})["provider"] = provider
            found.append(job)
    for body in found:
        body["metadata"].setdefault("namespace", "team")
        body["spec"] = with_defaults(body, schema[body["kind"]])["spec"]
    return found


def _documents(file: Path) -> Iterator[dict[str, Any]]:
    return (found for found in yaml.safe_load_all(file.read_text()) if isinstance(found, dict))


def record(release: str, revision: str, code: Path, work: Path) -> None:
    """Record a release whose code is in a folder."""
    environment = {**os.environ, **NUMERICS, "PYTHONPATH": os.pathsep.join(str(code / name) for name in _PACKAGES)}

    def run(script: str, *arguments: object) -> None:
        command = [sys.executable, str(_RECORDING / f"{script}.py"), *map(str, arguments)]
        subprocess.run(command, check=True, cwd=work, env=environment)

    definitions = (code / "manifests/crd.yaml").read_bytes()
    (work / "bodies.json").write_text(json.dumps(bodies(code, schemas(definitions.decode()))))
    run("children", work / "bodies.json", work / "children.json")
    run("valid_specs", _SPECS, work / "valid.json")
    inputs, directories = INPUTS / release, work / "directories"
    shutil.rmtree(inputs, ignore_errors=True)
    run("job_directories", inputs, directories)
    shutil.copytree(inputs, directories / "inputs")

    folder = RELEASES / release
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    commit, date = _git("log", "-1", "--format=%H %cI", revision).split()
    about = {"release": release, "commit": commit, "date": date}
    (folder / "release.json").write_text(json.dumps(about, indent=1) + "\n")
    shutil.copy(code / "manifests/install.yaml", folder)
    _compress(folder / "crd.yaml.gz", definitions)
    for name in ("children", "valid"):
        _compress(folder / f"{name}.json.gz", (work / f"{name}.json").read_bytes())
    _archive(folder / "directories.tar.gz", directories)


def _compress(file: Path, content: bytes) -> None:
    file.write_bytes(gzip.compress(content, mtime=0))


def _archive(file: Path, folder: Path) -> None:
    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return None if member.name.endswith(".log") and "/" not in member.name.removeprefix("./") else member

    with tarfile.open(file, "w:gz", compresslevel=9) as archive:
        archive.add(folder, arcname=".", filter=anonymous)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", required=True, help="name of the release, such as v0.1.0")
    parser.add_argument("--revision", help="commit of its code; default: the tag with the name of the release")
    given = parser.parse_args()
    revision = given.revision or given.release
    with tempfile.TemporaryDirectory() as folder:
        code, work = Path(folder) / "code", Path(folder) / "work"
        work.mkdir()
        check_out(revision, code)
        record(given.release, revision, code, work)


if __name__ == "__main__":
    main()
