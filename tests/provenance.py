"""Where figures come from: the commit that was tried, and the machine."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version

from tests import ROOT


def commit() -> str:
    """Of the checkout, and whether something in it is not committed but results and pages, which runs write.

    On a machine that has the files without git, SPOTUNE_COMMIT says what they are; without it, "unknown".
    """
    if given := os.environ.get("SPOTUNE_COMMIT"):
        return f"`{given}`"
    if not (ROOT / ".git").exists():
        return "unknown"
    measured = ("--", ".", ":!benchmarks/results", ":!docs")
    changed = " with uncommitted changes" if _git("status", "--porcelain", "--untracked-files=no", *measured) else ""
    return f"`{_git('rev-parse', '--short=12', 'HEAD')}`{changed}"


def machine() -> str:
    """Day and machine of this run."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    libraries = ", ".join(f"{name} {version(name)}" for name in ("ray", "torch", "deepspeed"))
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores and {memory:.0f} GiB "
        f"({platform.machine()}), Linux {platform.release()}, {libraries}."
    )


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
