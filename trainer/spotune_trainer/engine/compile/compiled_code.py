"""The compiled code of one rank in one generation: read before the first step, measured with it, and kept after it."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from spotune_trainer.bucket.folders import push_folder
from spotune_trainer.bucket.link import bucket_of
from spotune_trainer.engine.compile.cache import CompileCache, local_folder
from spotune_trainer.engine.compile.cache_key import compile_key
from spotune_trainer.engine.compile.compile_meter import CompileMeter, prepare_compiler

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from spotune.job import FinetuneJob
    from spotune_trainer.job_directory.layout import JobDirectory
    from spotune_trainer.job_directory.run_plan import RunPlan
    from spotune_trainer.observability.progress import ProgressReporter

logger = logging.getLogger("spotune.worker")


class CompiledCode:
    """Reads the cache and prepares the compiler; all of it before the model is built.

    Args:
        job: the job.
        plan: of the run.
        config: of the model.
        directory: of the job.
        generation: number of the worker group.
        rank: of this process; rank 0 writes the cache.
        reporter: gets the event `compiled`.
    """

    def __init__(
        self,
        job: FinetuneJob,
        plan: RunPlan,
        config: PretrainedConfig,
        directory: JobDirectory,
        generation: int,
        rank: int,
        reporter: ProgressReporter,
    ) -> None:
        self._directory = directory
        self._reporter = reporter
        self._rank = rank
        local = local_folder(directory.root, generation)
        key = compile_key(job, plan, config)
        self._cache = CompileCache(directory.compiled, key, local, writes=rank == 0, publish=self._publish)
        self._source = self._cache.load()
        self._meter: CompileMeter | None = CompileMeter()
        prepare_compiler()

    def record_first_step(self) -> None:
        """Record how long the first step waited for the compiler, and whether its code came from the cache."""
        if self._meter is None:
            return
        compilation, self._meter = self._meter.stop(), None
        found = f"{compilation.cached} of {compilation.graphs} graphs came from the cache"
        read = f", read from {self._cache.path.name} of the {self._source}" if self._source in ("job", "image") else ""
        logger.info("compiling took %.1f s (%s start: %s%s)", compilation.seconds, compilation.start, found, read)
        if self._rank == 0:
            event = {"start": compilation.start, **asdict(compilation), "cache": self._source or None}
            self._reporter.record_event("compiled", **event)

    def save(self) -> None:
        """Keep what was compiled, in the background."""
        self._cache.save()

    def _publish(self, _path: Path) -> None:
        """With a bucket, the pods of later generations find the file there."""
        if (bucket := bucket_of(self._directory)) is not None:
            push_folder(bucket, self._directory, self._directory.compiled)
