"""What a release rests on: one version everywhere, images that say what they are, a chart that names their digests."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.util import cache_from_source
from pathlib import Path

import pytest
import yaml

from charts import generate, pin
from tests import ROOT
from tests.cluster.own_images import SOURCE_DATE_EPOCH, TARGETS, VLLM_TARGET

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
OPERATOR = f"registry.example:5000/spotune/operator@sha256:{64 * 'a'}"
TRAINER = f"registry.example:5000/spotune/trainer@sha256:{64 * 'b'}"
SERVE = f"registry.example:5000/spotune/serve@sha256:{64 * 'c'}"
SERVE_VLLM = f"registry.example:5000/spotune/serve-vllm@sha256:{64 * 'd'}"


def test_chart_has_the_version_of_the_project() -> None:
    chart = yaml.safe_load((generate.CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_images_are_named_by_the_version_of_the_project() -> None:
    command = ["git", "grep", "-hoE", r"(operator|trainer|serve|serve-vllm|\$target):[0-9]+\.[0-9]+\.[0-9]+"]
    named = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert {name.rpartition(":")[2] for name in named} == {VERSION}


@pytest.mark.parametrize("target", [*TARGETS, VLLM_TARGET])
def test_image_says_what_it_is(target: str) -> None:
    (stage,) = re.findall(rf"^FROM \S+ AS {target}\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    labels = dict(re.findall(r"org\.opencontainers\.image\.(\w+)=\"([^\"]+)\"", stage))
    assert labels.keys() == {"title", "description", "version", "revision", "licenses"}
    assert labels["title"] == f"spotune {target}"
    for name in ("VERSION", "REVISION"):
        assert re.search(rf"^ARG .*\b{name}=", stage, re.MULTILINE), "an argument counts in its own stage alone"
        assert labels[name.lower()] == f"${{{name}}}"


def test_images_of_a_release_are_built_as_those_that_are_compared() -> None:
    page = (ROOT / "docs/release.md").read_text()
    assert f"--timestamp {SOURCE_DATE_EPOCH} --no-hosts" in page
    assert DOCKERFILE.count(f"SOURCE_DATE_EPOCH={SOURCE_DATE_EPOCH}") == 1


def test_modules_of_images_are_compiled_without_times(tmp_path: Path) -> None:
    """And those that a lower layer has compiled are left alone."""
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text("NAMES = {'a', 'b'}\n")
    kept = Path(cache_from_source(str(tmp_path / "first.py")))
    kept.parent.mkdir()
    kept.write_bytes(b"as it was")
    command = [sys.executable, "-S", "-B", str(ROOT / "images/compile_bytecode.py"), str(tmp_path)]
    subprocess.run(command, check=True)
    compiled = Path(cache_from_source(str(tmp_path / "second.py")))
    assert kept.read_bytes() == b"as it was"
    assert int.from_bytes(compiled.read_bytes()[4:8], "little") == 0b01, "hash-based, and not checked (PEP 552)"


def test_build_context_holds_what_the_images_are_made_of() -> None:
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {source for sources in copied for source in sources.split()} == kept


def test_pinned_chart_names_images_by_digest_and_is_otherwise_the_same(tmp_path: Path) -> None:
    copy = tmp_path / "spotune"
    pin.pinned(copy, OPERATOR, TRAINER, SERVE, SERVE_VLLM)
    was, now = (yaml.safe_load((each / "values.yaml").read_text()) for each in (generate.CHART, copy))
    was["image"] |= {"repository": "registry.example:5000/spotune/operator", "digest": f"sha256:{64 * 'a'}"}
    was["trainer"]["image"] = TRAINER
    was["serving"] |= {"image": SERVE, "vllmImage": SERVE_VLLM}
    assert now == was
    assert TRAINER in (copy / "README.md").read_text()
    for path in generate.CHART.rglob("*"):
        if path.is_file() and path.name not in ("values.yaml", "README.md"):
            assert (copy / path.relative_to(generate.CHART)).read_bytes() == path.read_bytes()


def test_pinned_values_keep_their_comments() -> None:
    text = '# -- Where from.\nimage:\n  digest: ""  # none\n  tag: x\n'
    assert pin.with_values(text, {"image.tag": "y", "image.digest": "d"}) == text.replace('""', '"d"').replace(
        "x", '"y"', 1
    )
    with pytest.raises(KeyError):
        pin.with_values(text, {"image.name": "y"})


@pytest.mark.parametrize("image", ["operator", "trainer", "serve", "serve-vllm"])
@pytest.mark.parametrize("reference", ["spotune/image:0.1.0", "spotune/image@sha256:12", f"@sha256:{64 * 'a'}"])
def test_image_without_a_digest_is_not_pinned(image: str, reference: str, tmp_path: Path) -> None:
    images = {"operator": OPERATOR, "trainer": TRAINER, "serve": SERVE, "serve-vllm": SERVE_VLLM} | {image: reference}
    with pytest.raises(ValueError, match=f"{image}'s image must be named by its digest"):
        pin.pinned(tmp_path / "spotune", *images.values())
    assert not (tmp_path / "spotune").exists()
