"""How a process waits for its GPU."""

from __future__ import annotations

import ctypes
import logging

_log = logging.getLogger(__name__)

_CUDA_DRIVER = "libcuda.so.1"
_BLOCKING_SYNC = 4
"""CU_CTX_SCHED_BLOCKING_SYNC of the CUDA driver API."""


def sleep_during_gpu_waits(driver: str = _CUDA_DRIVER) -> bool:
    """Let this process sleep while it waits for its GPU. By default CUDA spins, which is faster but takes a processor.

    Many processes on one GPU are faster if they sleep, because they have more waits than the node has processors.
    Call this before the first use of the GPU: it sets a flag of the context that CUDA makes then.

    Args:
        driver: the CUDA driver's library.

    Returns:
        Whether the process will sleep. If not, the log says why.
    """
    try:
        cuda, device = ctypes.CDLL(driver), ctypes.c_int()
        codes = {
            "cuInit": cuda.cuInit(0),
            "cuDeviceGet": cuda.cuDeviceGet(ctypes.byref(device), 0),
            "cuDevicePrimaryCtxSetFlags": cuda.cuDevicePrimaryCtxSetFlags_v2(device, _BLOCKING_SYNC),
        }
    except (OSError, AttributeError) as error:  # no driver, or one without this function
        _log.warning("this replica spins while it waits for its GPU: %s", error)
        return False
    failed = {name: code for name, code in codes.items() if code != 0}
    if failed:
        _log.warning("this replica spins while it waits for its GPU: error codes of the CUDA driver: %s", failed)
    return not failed
