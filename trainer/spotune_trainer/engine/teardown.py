"""Leave a generation without leaving the process: abort its collectives, and free all that belongs to it.

A rank that lost a peer is blocked in a collective, or about to be. NCCL can abort its communicators. gloo has no abort,
but a collective fails as soon as one of its connections is closed, as if the peer had been killed. So all TCP
connections of the process are shut down, including those to the rendezvous. The peers' collectives fail, too.

What torch and DeepSpeed keep beyond process groups and engine (DeepSpeed 0.19):

    deepspeed.comm.comm.cdb                                     the backend object
    deepspeed.utils.groups                                      clones of process groups
    engine._ENGINE_BACKWARD_GRAPH_TRACKER                       an interrupted backward pass
    parameter_offload.FWD_MODULE_STACK                          modules of an interrupted forward pass at stage 3
    partition_parameters.Init.param_id                          counter of parameters: all ranks must agree on it
    PartitionedParameterCoordinator.__params_to_release         a cache whose keys are the engine's modules
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import deepspeed
import deepspeed.comm.comm
import numpy as np
import torch
from deepspeed.runtime import engine
from deepspeed.runtime.zero import parameter_offload, partition_parameters
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import groups
from torch import distributed
from torch.distributed import distributed_c10d

_THREADS_SECONDS = 1.0
"""How long threads that belong to the generation may take to end, and to give up what they refer to."""
_RETRY_SECONDS = 0.05
_TCP_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_PARAMS_TO_RELEASE = "_PartitionedParameterCoordinator__params_to_release"
_aborting = threading.Lock()
aborted = threading.Event()
"""Set from an abort until the process is ready for its next generation."""


def abort_process_groups() -> None:
    """Make every collective of this process fail, the one that it is blocked in as well; from any thread."""
    with _aborting:
        aborted.set()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for group in list(distributed_c10d._world.pg_map):
                with suppress(RuntimeError):  # a group without NCCL
                    group._get_backend(torch.device("cuda")).abort()
        _shut_down_connections()


def _shut_down_connections() -> None:
    """Shut down all TCP connections of this process, but no listening socket: gloo's threads do not expect that."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if str(link.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as connection:
                    _shut_down(connection)


def _shut_down(connection: socket.socket) -> None:
    is_tcp = connection.family in _TCP_FAMILIES and connection.type == socket.SOCK_STREAM
    if is_tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class ProcessBaseline:
    """State of a process before its first generation, to which it returns before each further one.

    Attributes:
        threads: that it had.
        seed: of PyTorch's random generators.
        numpy_state: of NumPy's.
    """

    threads: frozenset[threading.Thread]
    seed: int
    numpy_state: Any

    @classmethod
    def of_this_process(cls) -> Self:
        """The state as it is now."""
        return cls(frozenset(threading.enumerate()), torch.initial_seed(), np.random.get_state())

    def restore(self) -> str | None:
        """Free what belongs to the last generation. Call it when no frame of it is left.

        Returns:
            Why the process must not take part in another generation; None if nothing of the last one is left.
        """
        abort_process_groups()
        _destroy_engines()
        _forget_process_groups()
        _forget_interrupted_backward_pass()
        parameter_offload.FWD_MODULE_STACK.clear()
        partition_parameters.Init.param_id = 0
        inspect.getclosurevars(getattr(PartitionedParameterCoordinator, _PARAMS_TO_RELEASE)).nonlocals[
            "func"
        ].cache_clear()
        problem = _remaining_modules() or self._remaining_threads() or _changed_mode()
        if problem is None:
            torch.manual_seed(self.seed)
            np.random.set_state(self.numpy_state)
            _return_memory()
            aborted.clear()
        return problem

    def _remaining_threads(self) -> str | None:
        """Message about threads of the generation that do not end; None if all have ended."""
        until = time.monotonic() + _THREADS_SECONDS
        others = [thread for thread in threading.enumerate() if thread not in self.threads]
        for thread in others:
            thread.join(max(0.0, until - time.monotonic()))
        running = [thread.name for thread in others if thread.is_alive()]
        return f"threads still run: {', '.join(running)}" if running else None


def _forget_interrupted_backward_pass() -> None:
    tracker = engine._ENGINE_BACKWARD_GRAPH_TRACKER
    tracker._active_states.clear()
    tracker._graph_task_refcounts.clear()
    engine._ENGINE_BACKWARD_GRAPH_CONTEXT.set(())


def _destroy_engines() -> None:
    """Remove the engines' hooks in autograd's nodes: the garbage collector does not see what these refer to."""
    for each in _of_kind(deepspeed.DeepSpeedEngine):
        each.destroy()


def _of_kind(kind: type) -> list[Any]:
    """The living objects of a class, except those that the fork server had."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _forget_process_groups() -> None:
    if distributed.is_initialized():
        distributed_c10d._abort_process_group()
    distributed_c10d._world.group_count = 0  # an aborted start of a group may have counted
    deepspeed.comm.comm.cdb = None
    groups._release_process_group_references()


def _remaining_modules() -> str | None:
    """Message about parts of a model or an engine that something still refers to; None if there are none.

    Waits a moment for threads that leave what they were doing, as autograd's own thread does on a GPU.
    """
    until = time.monotonic() + _THREADS_SECONDS
    while True:
        gc.collect()
        kinds = {type(each).__name__ for each in _of_kind(torch.nn.Module)}
        if not kinds:
            return None
        if time.monotonic() > until:
            return f"parts of the model are still in memory: {', '.join(sorted(kinds))}"
        time.sleep(_RETRY_SECONDS)


def _changed_mode() -> str | None:
    """Message about modes of PyTorch that an interrupted computation left behind; None if there are none."""
    is_default = torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32
    return None if is_default else "an interrupted computation left PyTorch in another mode"


def _return_memory() -> None:
    """Give free memory back: to the device, which other processes may share, and to the operating system."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    ctypes.CDLL(None).malloc_trim(0)
