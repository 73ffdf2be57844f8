"""Commands on the pages are right: those that need neither cluster nor training are run, the others are parsed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from charts.generate import CHART, documented
from spotune.cli.main import command_line
from spotune.job import FinetuneJobSpec
from spotune.job_file.load import load_resource
from spotune_operator.settings import PREFIX, Settings
from tests import ROOT
from tests.pages import PAGES, Line, blocks, lines, page_name
from tests.trainer.support.tiny import save_source

README = ROOT / "README.md"
REFERENCE = ROOT / "docs/reference"
WITHOUT_CLUSTER = {"crd", "plan", "render", "shard", "simulate", "validate"}
FILTERS = {"grep", "head"}
PROGRAMS = FILTERS | {
    *("aws", "az", "docker", "eksctl", "gcloud", "git", "go", "helm", "hf", "kubectl", "make", "pip", "python"),
    *("base64", "buildah", "cat", "cd", "cosign", "crane", "curl", "jq", "syft", "xargs"),
    *("pre-commit", "rsync", "sed", "spotune", "spotune-testcluster", "tar", "unset"),
}
"""Programs that a page may use."""
READERS_FILES = {"sweep.yaml", "job.yaml", "finetunejob.yaml", "modelservice.yaml", "kuberay.yaml", "volume.yaml", "-"}
"""Files that a reader brings; `job.yaml` and `finetunejob.yaml` hold the job of the README."""
MADE_LATER = ("*/data/*", "*/data", "build/*", "runs/*")
"""Paths in .gitignore that a command of the page creates."""
FILE_OPTIONS = ("-f", "--filename", "--values", "--patch-file", "--config-file", "--file")
TOKENIZING = ("docs/how-to/data.md", "examples/t5-wikisql/README.md")
"""Pages whose commands read rows: each imports torch for seconds."""
WIDTH = "160"
COMMAND_LINE = command_line()

TYPED = [(page, line) for page in PAGES for line in lines(page)]
RUN = [page for page in PAGES if page.parent != REFERENCE]
"""Without the reference: the examples in the help of commands name files that do not exist."""


def program(words: list[str]) -> str:
    return Path(words[0]).name


def takes_no_cluster(words: list[str]) -> bool:
    return program(words) == "spotune" and (words[1] in WITHOUT_CLUSTER or words[-1] in ("--help", "--version"))


def runnable(line: Line) -> bool:
    """Whether a line can be run as it is: it has no variables, and uses only commands without a cluster."""
    found = [words for words in line.commands() if program(words) not in FILTERS]
    return bool(found) and "$" not in line.text and all(takes_no_cluster(words) for words in found)


def readers_job() -> str:
    (block,) = blocks(README, "yaml")
    return block.text


def problem_of_spotune(words: list[str]) -> str:
    """The problem with a `spotune` command line, found by the command's own parser; empty if there is none."""
    command: Any = COMMAND_LINE
    name = "spotune"
    try:
        while hasattr(command, "commands") and words and not words[0].startswith("-"):
            name, *words = words
            if name not in command.commands:
                return f"there is no command {name}"
            command = command.commands[name]
        command.make_context(name, words)
    except typer.Exit:  # --help and --version
        return ""
    except typer.TyperException as error:
        return f"{name}: {error.format_message()}"
    return ""


def wrong_values(words: list[str]) -> Iterator[str]:
    """Yields a problem for each value that a Helm command sets and the chart does not have."""
    values = {value.path: value.default for value in documented((CHART / "values.yaml").read_text())}
    for option, given in pairwise(words):
        if option in ("--set", "--set-string"):
            for key in (pair.partition("=")[0] for pair in given.split(",")):
                free = any(
                    isinstance(default, Mapping) and key.startswith(f"{path}.") for path, default in values.items()
                )
                if key not in values and not free:
                    yield f"the chart has no value {key}"


def missing_files(words: list[str]) -> Iterator[str]:
    """Yields a problem for each file of the repository that a command names and that does not exist."""
    tops = {path.name for path in ROOT.iterdir() if path.is_dir()}
    pairs = [] if program(words) == "spotune" else pairwise(words)
    named = {given for option, given in pairs if option in FILE_OPTIONS} - READERS_FILES
    for word in named | {word for word in words if word.partition("/")[0] in tops and "/" in word}:
        if not (ROOT / word).exists() and not any(fnmatch(word, pattern) for pattern in MADE_LATER):
            yield f"there is no {word}"


@pytest.mark.parametrize(("page", "line"), TYPED, ids=[f"{page_name(page)}: {line.text}" for page, line in TYPED])
def test_typed_command_is_valid(page: Path, line: Line) -> None:
    del page
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    problems: list[str] = []
    for words in line.commands():
        name = program(words)
        if name not in PROGRAMS:
            problems.append(f"what is {name}?")
        if name == "spotune":
            problems.append(problem_of_spotune(words[1:]))
        if name == "make":
            problems += [f"there is no target {word}" for word in words[1:] if "=" not in word and word not in targets]
        if name == "helm":
            problems += wrong_values(words)
        problems += missing_files(words)
    assert [problem for problem in problems if problem] == []


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder as a reader has it: the examples, a job, and t5-small from the Hub, here a tiny model."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("data"))
    for name in READERS_FILES - {"-"}:
        (tmp_path / name).write_text(readers_job())
    model = tmp_path / "hub/models--google-t5--t5-small"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text("0" * 40)
    save_source(model / "snapshots" / ("0" * 40), "seq2seq")
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.long] if page_name(page) in TOKENIZING else [])
        for page in RUN
        if any(runnable(line) for line in lines(page))
    ],
    ids=page_name,
)
def test_command_without_cluster_prints_what_the_page_shows(page: Path, place: Path) -> None:
    for block in blocks(page, "json", "yaml", "text"):
        if block.title:
            (place / block.title).parent.mkdir(parents=True, exist_ok=True)
            (place / block.title).write_text(block.text)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    hub = {"HF_HUB_CACHE": str(place / "hub"), "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **hub, "PATH": path, "COLUMNS": WIDTH}
    for line in filter(runnable, lines(page)):
        done = subprocess.run(
            ["bash", "-c", line.text], cwd=place, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line.text}\n{done.stderr}"
        printed = {" ".join(text.split()) for text in done.stdout.splitlines()}
        assert [text for text in line.shown if " ".join(text.split()) not in printed] == [], done.stdout


def commands_of(span: str) -> tuple[list[Any], list[str]]:
    """The commands that a code span names (`a|b` names two), and the words after them."""
    words = re.split(r"[ ,]+", span.replace("\\|", "|"))
    commands: list[Any] = [COMMAND_LINE]
    while words and all(hasattr(command, "commands") for command in commands):
        names = words.pop(0).split("|")
        commands = [group.commands[name] for group in commands for name in names]
    return commands, words


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_that_a_text_names_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`spotune ([a-z][^`]*)`", text):
        commands, words = commands_of(span)
        known = {option for command in commands for parameter in command.params for option in parameter.opts}
        named = {option for word in words for option in re.findall(r"^--[a-z-]+", word)}
        assert named <= known | {"--help"}, span


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_settings_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(rf"{PREFIX}([A-Z_]+)\b", page.read_text()))
    assert {name for name in named if name.lower() not in Settings.__dataclass_fields__} == set()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=page_name)
def test_yaml_of_a_page_is_valid(page: Path, tmp_path: Path) -> None:
    sections = {field.alias for field in FinetuneJobSpec.model_fields.values()}
    for block in blocks(page, "yaml"):
        for content in yaml.safe_load_all(block.text):
            if content.keys() <= sections:
                job = yaml.safe_load(readers_job())
                job["spec"] |= content
            elif content["kind"] in ("FinetuneJob", "ModelService"):
                job = content
            else:
                assert {"apiVersion", "metadata"} <= content.keys()
                continue
            file = tmp_path / "job.yaml"
            file.write_text(yaml.safe_dump(job))
            load_resource(file)
