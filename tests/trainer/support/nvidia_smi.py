"""A `nvidia-smi` for tests, which says that the GPU of one node has uncorrected ECC errors."""

from __future__ import annotations

from pathlib import Path

from spotune_trainer.job_directory.node_name import NODE_NAME

_SCRIPT = """#!/bin/sh
errors=0
[ "${node}" = "{bad}" ] && errors=2
echo "0, NVIDIA H100 80GB HBM3, $errors, No, No, No, Not Active, Not Active, Not Active"
"""


def install_nvidia_smi(folder: Path, bad_node: str) -> None:
    """Write the program into a folder, which the test puts on PATH."""
    program = folder / "nvidia-smi"
    program.write_text(_SCRIPT.replace("{node}", NODE_NAME).replace("{bad}", bad_node))
    program.chmod(0o755)
