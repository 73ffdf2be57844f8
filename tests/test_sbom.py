"""`make sbom` lists every pin with the hashes that its files are checked against."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

pytestmark = pytest.mark.long  # installs the tool from a package index, once

PIN = re.compile(r"^([a-z0-9-]+)==([^\s;]+).*?(?=^\S|\Z)", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder() -> Path:
    subprocess.run(["make", "sbom"], cwd=ROOT, check=True, capture_output=True)
    return ROOT / "build/sbom"


@pytest.mark.parametrize("image", ["operator", "trainer", "serve"])
def test_sbom_lists_each_pin_with_its_hashes(image: str, folder: Path) -> None:
    bom: dict[str, Any] = json.loads((folder / f"{image}.cdx.json").read_text())
    assert bom["bomFormat"] == "CycloneDX"
    assert bom["metadata"]["component"]["name"] == "spotune"
    listed = {
        (each["name"], each["version"]): {
            found["content"] for reference in each["externalReferences"] for found in reference["hashes"]
        }
        for each in bom["components"]
    }
    pinned = {
        (match[1], match[2]): set(re.findall(r"sha256:([0-9a-f]{64})", match[0]))
        for match in PIN.finditer((ROOT / f"constraints/{image}.txt").read_text())
    }
    assert len(pinned) > 30
    assert listed == pinned
