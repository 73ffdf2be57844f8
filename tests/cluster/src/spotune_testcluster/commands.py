"""Programs of this machine that make the images: what they say when they fail reaches the person who waits for them."""

import subprocess
from collections.abc import Sequence
from typing import BinaryIO

from spotune_testcluster.errors import ClusterError

# In front of a command: its mounts go when it ends, and all its processes end when this one does, however that ends.
ALONE = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
)
SECONDS_AT_MOST = 1200.0


def run(command: Sequence[str], what: str, standard_input: BinaryIO | None = None) -> str:
    """Run a command and return its standard output.

    Args:
        command: Program and arguments.
        what: What it does, for the error's sentence.
        standard_input: A file that it reads.

    Raises:
        ClusterError: It failed; the text is the end of what it printed and complained.
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
