"""How long this process compiles before its first step is done, and how much of that code came from the cache."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo import callback
from torch._dynamo.utils import counters

logger = logging.getLogger("spotune.worker")


@dataclass(frozen=True)
class Compilation:
    """What was compiled.

    Attributes:
        seconds: in which training waited for the compiler, also where it only read the cache.
        graphs: number of graphs.
        cached: number of those that came from the cache.
    """

    seconds: float
    graphs: int
    cached: int

    @property
    def start(self) -> str:
        """`warm` if every graph came from the cache, `cold` if none did, else `partly`."""
        if self.cached == 0:
            return "cold"
        return "warm" if self.cached == self.graphs else "partly"


class CompileMeter:
    """Measures from its creation until `stop`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None
        self._before = _counts()
        callback.callback_handler.register_start_callback(self._compiler_starts)
        callback.callback_handler.register_end_callback(self._compiler_stops)

    def stop(self) -> Compilation:
        """What was compiled so far. Measures no longer."""
        callback.callback_handler.remove_start_callback(self._compiler_starts)
        callback.callback_handler.remove_end_callback(self._compiler_stops)
        hits, misses = (now - before for now, before in zip(_counts(), self._before, strict=True))
        return Compilation(round(self._seconds, 3), hits + misses, hits)

    def _compiler_starts(self, *_: Any) -> None:
        self._since = time.monotonic()

    def _compiler_stops(self, *_: Any) -> None:
        if self._since is not None:
            self._seconds += time.monotonic() - self._since
            self._since = None


def _counts() -> tuple[int, int]:
    """Graphs that this process found in the cache so far, and graphs that it did not find."""
    found = counters["aot_autograd"]
    return found["autograd_cache_hit"], found["autograd_cache_miss"] + found["autograd_cache_bypass"]


def prepare_compiler() -> None:
    """In a thread: start the processes that compile kernels, and hash PyTorch's and Triton's files for cache keys.

    The compiler would do both at its first graph, when training waits for it. Its modules are imported already.
    """
    threading.Thread(target=_prepare, name="compiler", daemon=True).start()


def _prepare() -> None:
    try:
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.codecache import CacheBase, torch_key

        if torch.cuda.is_available():
            compiler: Any = AsyncCompile
            compiler.warm_pool()
            compiler.use_process_pool()  # sends the first task, which makes them import what they need
        torch_key()
        CacheBase.get_system()
    except Exception as error:  # noqa: BLE001 - the compiler does it again, and reports what is wrong
        logger.debug("the compiler could not be prepared: %s", error)
