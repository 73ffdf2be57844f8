"""Why a command has failed: read from exit statuses and from what launchers and programs print."""

from __future__ import annotations

import pytest

from spotune.retry import FailureCause
from spotune_trainer.commands.exit_status import failure_of
from spotune_trainer.training.failures import classify

REPORT = """\
{traceback}
E1127 09:40:06.294 25979 torch/distributed/elastic/multiprocessing/api.py:950] failed (exitcode: {status})
Traceback (most recent call last):
  File "/venv/bin/torchrun", line 10, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-27_09:40:06
  host      : worker-1
  rank      : 1 (local_rank: 1)
  exitcode  : {status} (pid: 26001)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


@pytest.mark.parametrize(
    ("traceback", "status", "cause", "message"),
    [
        (
            "[rank1]: Traceback (most recent call last):\n[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried",
            1,
            FailureCause.OUT_OF_MEMORY,
            "training.command: torchrun ran out of memory: torch.OutOfMemoryError: CUDA out of memory. Tried",
        ),
        (
            "[rank1]: RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            1,
            FailureCause.OUT_OF_MEMORY,
            "training.command: torchrun ran out of memory: RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
        ),
        (
            "[rank1]: torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
            1,
            FailureCause.INFRASTRUCTURE,
            "training.command: torchrun met a fault of the hardware: torch.AcceleratorError: CUDA error: uncorrectable",
        ),
        (
            "[rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.3]:41234",
            1,
            FailureCause.COMMUNICATION,
            "training.command: torchrun lost its peers: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection",
        ),
        (
            "[rank0]: torch.distributed.DistBackendError: NCCL error\n[rank1]: ValueError: 3 classes",
            1,
            FailureCause.APP_ERROR,
            "training.command: torchrun ended with exit status 1: ValueError: 3 classes",
        ),
        (
            "[rank0]: OSError: distilbert-base is not a local folder",
            1,
            FailureCause.APP_ERROR,
            "training.command: torchrun ended with exit status 1: OSError: distilbert-base is not a local folder",
        ),
        (
            "[rank0]: ValueError: 3 classes",
            -6,
            FailureCause.APP_ERROR,
            "training.command: torchrun ended with exit status 1: ValueError: 3 classes",
        ),
        (
            "",
            -6,
            FailureCause.COMMUNICATION,
            "training.command: torchrun lost its peers: a process was",
        ),
        ("", -9, FailureCause.WORKER_LOST, "a process of torchrun was killed by SIGKILL"),
        ("[rank1]: KeyError: 'a'", -11, FailureCause.WORKER_LOST, "a process of torchrun was killed by SIGSEGV"),
    ],
    ids=[
        "memory",
        "memory of cuBLAS",
        "hardware",
        "peer",
        "program",
        "name with dist",
        "aborted peer",
        "aborted",
        "killed",
        "crashed",
    ],
)
def test_the_report_of_torchrun_says_how_its_first_process_ended(
    traceback: str, status: int, cause: FailureCause, message: str
) -> None:
    failure = failure_of("torchrun", 1, REPORT.format(traceback=traceback, status=status))
    assert classify(failure) is cause
    assert str(failure).startswith(message)


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (137, FailureCause.WORKER_LOST),
        (143, FailureCause.WORKER_LOST),
        (-9, FailureCause.WORKER_LOST),
        (1, FailureCause.APP_ERROR),
        (127, FailureCause.APP_ERROR),
        (128, FailureCause.APP_ERROR),
        (255, FailureCause.APP_ERROR),
    ],
)
def test_a_signal_is_a_lost_process_and_any_other_status_an_error(status: int, cause: FailureCause) -> None:
    assert classify(failure_of("train.sh", status, "")) is cause
