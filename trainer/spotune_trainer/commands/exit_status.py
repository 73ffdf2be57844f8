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
from spotune_trainer.training.failures import ProgramError, is_hardware_error, is_out_of_memory

_FIRST_FAILURE = re.compile(r"Root Cause \(first observed failure\):.*?exitcode\s*: (-?\d+)", re.DOTALL)
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)
_OF_LAUNCHER = "torch.distributed.elastic"
_ABORTED = signal.SIGABRT.name
_LOST_PEER = re.compile(
    r"\bDist(Backend|Network|Store)Error\b|\bgloo/|\bGloo\b|NCCL error|nccl(Remote|System)Error"
    r"|connection (closed|reset) by peer",
    re.IGNORECASE,
)
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
    own, of_peer = _last_exceptions(output)
    if own and is_out_of_memory(own):
        return ProgramError(FailureCause.OUT_OF_MEMORY, f"{FIELD}: {program} ran out of memory: {own}")
    for line in filter(None, (own, of_peer)):
        if is_hardware_error(line):
            return ProgramError(FailureCause.INFRASTRUCTURE, f"{FIELD}: {program} met a fault of the hardware: {line}")
    if killed_by not in (None, _ABORTED):
        return ProgramError(FailureCause.WORKER_LOST, f"a process of {program} was killed by {killed_by}")
    if own:
        return JobError(f"{FIELD}: {program} ended with exit status {status}: {own}; see the log of the worker")
    if of_peer or killed_by:  # NCCL aborts a process whose peers are gone
        lost = of_peer or f"a process was ended by {killed_by}"
        return ProgramError(FailureCause.COMMUNICATION, f"{FIELD}: {program} lost its peers: {lost}")
    return JobError(f"{FIELD}: {program} ended with exit status {status}; see the log of the worker")


def _signal(status: int) -> str | None:
    """The name of the signal that an exit status stands for; None if it stands for none."""
    number = -status if status < 0 else status - 128
    return signal.Signals(number).name if number in set(signal.Signals) else None


def _last_exceptions(output: str) -> tuple[str | None, str | None]:
    """The last lines of the last tracebacks: of an error of the program itself, and of one that a lost peer causes."""
    found = [line[:_MAX_SHOWN_CHARACTERS] for line in _EXCEPTION.findall(output) if not line.startswith(_OF_LAUNCHER)]
    own = [line for line in found if not _LOST_PEER.search(line)]
    of_peer = [line for line in found if _LOST_PEER.search(line)]
    return own[-1] if own else None, of_peer[-1] if of_peer else None
