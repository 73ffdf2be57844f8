"""The Go parts of the test cluster are formatted and vetted, and pass their own tests."""

import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

MODULE = Path(__file__).parent / "binaries"
OUR_OWN = ("./coredns", "./gpuplugin", "./networkpolicy", "./podsecurity", "./provisioner")


def _go(*arguments: str) -> str:
    done = subprocess.run(["go", *arguments], cwd=MODULE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_formatted() -> None:
    unformatted = subprocess.run(["gofmt", "-l", "."], cwd=MODULE, capture_output=True, text=True, check=True).stdout
    assert unformatted == ""


@pytest.mark.long
def test_vetted() -> None:
    _go("vet", "-mod=readonly", *OUR_OWN)


@pytest.mark.long
def test_their_own_tests_pass() -> None:
    _go("test", "-mod=readonly", *OUR_OWN)
