"""Runs programs of this machine that make the images. If one fails, the error contains its output."""

import subprocess
from collections.abc import Sequence
from typing import BinaryIO

from spotune_testcluster.errors import ClusterError

# Command prefix. The command gets its own mounts, and the kernel kills its processes when this process exits.
ALONE = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
)
SECONDS_AT_MOST = 1200.0


def run(command: Sequence[str], what: str, standard_input: BinaryIO | None = None) -> str:
    """Run a command and return its standard output.

    Args:
        command: Program and arguments.
        what: Description of the command, for the error message.
        standard_input: A file as its standard input.

    Raises:
        ClusterError: The command failed; the message has the end of its output.
    """
    done = subprocess.run(
        command,
        stdin=standard_input or subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=SECONDS_AT_MOST,
    )
    printed = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        said = (printed + done.stderr.decode(errors="replace")).strip()
        raise ClusterError(f"{what} failed ({done.returncode}):\n{said[-4000:]}")
    return printed
