"""Why a command has failed: from its exit status, and from the end of its output.

torchrun exits with status 1 whatever has happened. Its report says how the first of its processes has ended, and the
traceback of that process is in the output before.
"""

from __future__ import annotations

import re
import signal

from spotune.errors import JobError
from spotune.retry import FailureCause
from spotune_trainer.commands.environment import FIELD
from spotune_trainer.training.failures import ProgramError

_FIRST_FAILURE = re.compile(r"Root Cause \(first observed failure\):.*?exitcode\s*: (-?\d+)", re.DOTALL)
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)
_OF_LAUNCHER = "torch.distributed.elastic"
_OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "MemoryError", "can't allocate memory")
_COMMUNICATION = ("dist", "gloo", "nccl", "connection closed by peer", "connection reset by peer")
_MAX_SHOWN_CHARACTERS = 500


def failure_of(program: str, status: int, output: str) -> Exception:
    """The exception for a program that has failed.

    Args:
        program: its name, for messages.
        status: exit status; 128 + n or -n if signal n has killed it.
        output: the end of what it has printed.

    Returns:
        JobError if the program itself is wrong; else ProgramError, with the cause.
    """
    reported = _FIRST_FAILURE.findall(output)
    killed_by = _signal(int(reported[-1]) if reported else status)
    error = _last_exception(output)
    explanation = f": {error}" if error else ""
    if any(sign in (error or "") for sign in _OUT_OF_MEMORY):
        return ProgramError(FailureCause.OUT_OF_MEMORY, f"{FIELD}: {program} ran out of memory{explanation}")
    if killed_by is not None:
        return ProgramError(FailureCause.WORKER_LOST, f"a process of {program} was killed by {killed_by}")
    if error and any(sign in error.lower() for sign in _COMMUNICATION):
        return ProgramError(FailureCause.COMMUNICATION, f"{FIELD}: {program} lost its peers{explanation}")
    return JobError(f"{FIELD}: {program} ended with exit status {status}{explanation}; see the log of the worker")


def _signal(status: int) -> str | None:
    """The name of the signal that an exit status stands for; None if it stands for none."""
    number = -status if status < 0 else status - 128
    return signal.Signals(number).name if number in set(signal.Signals) else None


def _last_exception(output: str) -> str | None:
    """The last line of the last traceback of a process, without those of its launcher."""
    found = [line for line in _EXCEPTION.findall(output) if not line.startswith(_OF_LAUNCHER)]
    of_peers = [line for line in found if not any(sign in line.lower() for sign in _COMMUNICATION)]
    return next((line[:_MAX_SHOWN_CHARACTERS] for line in reversed(of_peers or found)), None)
