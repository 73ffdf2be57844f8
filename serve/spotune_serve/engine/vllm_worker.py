"""What spotune adds to vLLM's worker processes. vLLM imports this module there (its option `worker_extension_cls`)."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from typing import Any

from spotune_serve.engine.vllm_parameters import GENERATED_TOKENS

FRONTEND_VARIABLE = "SPOTUNE_VLLM_FRONTEND"
"""Process id of the engine's owner."""


class WorkerExtension:
    """A base class that vLLM adds to its worker class before it creates the worker."""

    def __new__(cls, *_arguments: Any, **values: Any) -> WorkerExtension:
        """Prepare the process when vLLM creates its worker."""
        from vllm.v1.worker.gpu.sample.sampler import Sampler

        count_generated_tokens(Sampler)
        same_process = values["vllm_config"].parallel_config.distributed_executor_backend == "uni"
        engine_core = os.getpid() if same_process else os.getppid()
        on_exit_of(int(os.environ[FRONTEND_VARIABLE]), lambda: os.kill(engine_core, signal.SIGKILL))
        return super().__new__(cls)


def count_generated_tokens(sampler: Any) -> None:
    """Make vLLM's sampler count the tokens of earlier replicas as generated ones.

    They reach vLLM as the end of the prompt, and presence and frequency penalties do not count a prompt.

    Args:
        sampler: vLLM's class `Sampler` of the model runner V2; changed in place, once.
    """
    original = sampler.add_request
    if original.__module__ == __name__:
        return

    def add_request(self: Any, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        prompt_len -= (sampling_params.extra_args or {}).get(GENERATED_TOKENS, 0)
        self.req_states.prompt_len.np[req_idx] = prompt_len
        original(self, req_idx, prompt_len, sampling_params)

    sampler.add_request = add_request


def on_exit_of(pid: int, action: Callable[[], None]) -> None:
    """Call `action` from a thread when a process has ended.

    vLLM's engine process does not end with its owner: after `kill -9` of a replica it would keep the GPU's memory, and
    no other replica could start there.
    """
    try:
        descriptor = os.pidfd_open(pid)  # becomes readable when the process ends
    except ProcessLookupError:
        action()
        return

    def wait() -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
        os.close(descriptor)
        action()

    threading.Thread(target=wait, name=f"exit-of-{pid}", daemon=True).start()
