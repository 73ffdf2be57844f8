"""Ray Train in a rank: `ray.train.report`, `get_checkpoint` and `get_context` of a training function.

The function runs under `ray.train.torch.TorchTrainer` in the mode for processes that have been started already, as by
torchrun (`num_workers=0`). The worker group is ours, so that it outlives a lost head and starts in a second
(docs/adr/0064). Ray's functions call the `TrainFnUtils` of their process; here they are answered by our session.
"""

from __future__ import annotations

import inspect
import math
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray.train
from ray.air._internal.util import StartTraceback
from ray.runtime_context import RuntimeContext
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.train_fn_utils import (
    LocalTrainFnUtils,
    set_train_fn_utils,
)
from ray.train.v2.api.preemption import PreemptionInfo
from ray.train.v2.api.report_config import CheckpointUploadMode
from torch import distributed

from spotune.errors import JobError
from spotune_trainer.training.task import RankPlacement
from spotune_trainer.training_functions.session import Session


class SessionUtils(LocalTrainFnUtils):
    """Answers what a training function asks of Ray Train.

    Args:
        name: of the job.
        place: of this process in its group.
        session: of the rank.
    """

    def __init__(self, name: str, place: RankPlacement, session: Session) -> None:
        super().__init__(
            experiment_name=name,
            world_size=place.world_size,
            world_rank=place.rank,
            local_rank=place.local_rank,
            local_world_size=place.local_world_size,
            node_rank=place.node,
        )
        self._session = session

    def report(
        self,
        metrics: Mapping[str, Any],
        checkpoint: ray.train.Checkpoint | None = None,
        checkpoint_dir_name: str | None = None,
        checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
        delete_local_checkpoint_after_upload: bool | None = None,
        checkpoint_upload_fn: Callable[..., Any] | None = None,
        validation: Any = False,
    ) -> None:
        """Report metrics and commit the checkpoint; see `Session.report`. The files are durable on return.

        Raises:
            JobError: an option is not supported.
        """
        refused = {
            "checkpoint_upload_mode": checkpoint_upload_mode is CheckpointUploadMode.NO_UPLOAD,
            "checkpoint_upload_fn": checkpoint_upload_fn is not None,
            "validation": bool(validation),
        }
        for option, is_given in refused.items():
            if is_given:
                raise JobError(
                    f"training.function calls ray.train.report with {option}, which is not supported: omit it"
                )
        # Not by Ray's own method, which logs each report.
        self._last_metrics, self._last_checkpoint = dict(metrics), checkpoint  # type: ignore[assignment]
        if checkpoint is None:
            self._session.report(metrics)
            return
        with checkpoint.as_directory() as folder:
            try:
                self._session.report(metrics, Path(folder))
            finally:
                if delete_local_checkpoint_after_upload:
                    shutil.rmtree(folder, ignore_errors=True)

    def get_checkpoint(self) -> ray.train.Checkpoint | None:
        """The checkpoint that training continues from."""
        found = self._session.newest_checkpoint()
        return ray.train.Checkpoint.from_directory(found[1]) if found is not None else None

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        """Not supported.

        Raises:
            JobError: always.
        """
        raise JobError(
            "training.function asks for a shard of Ray Data, which jobs do not have: read the data in the function"
        )

    def get_preemption_info(self) -> PreemptionInfo | None:
        """When the worker group has to leave, as of the last report; None without a notice."""
        left = self._session.seconds_left
        if left is None:
            return None
        deadline = None if math.isinf(left) else int((time.time() + left) * 1000)
        return PreemptionInfo(deadline_ms=deadline, preempted_node_to_ranks={})

    def barrier(self) -> None:
        """Wait for all ranks."""
        distributed.barrier(group=self._session.ranks.group)

    def broadcast_from_rank_zero(self, data: Any) -> Any:
        """The value of rank 0."""
        found = [data]
        distributed.broadcast_object_list(found, src=0, group=self._session.ranks.group)
        return found[0]


def run_with_ray_train(
    function: Callable[[], None], name: str, directory: Path, begin: Callable[[], SessionUtils], end: Callable[[], None]
) -> None:
    """Call a function under `TorchTrainer`, in this process.

    Ray initializes the process group that the environment describes, and destroys it after `end`.

    Args:
        function: uses Ray Train.
        name: of the job.
        directory: of the job.
        begin: called before the function, once the process group exists.
        end: called after it.
    """
    job_id = f"{zlib.crc32(str(directory).encode()):08x}"
    # Ray's callbacks of libraries ask for it, but the rank is no process of Ray.
    RuntimeContext.get_job_id = lambda _: job_id  # type: ignore[assignment, method-assign]

    def train() -> None:
        set_train_fn_utils(begin())
        function()
        end()

    cause = None
    trainer = TorchTrainer(
        train, scaling_config=ray.train.ScalingConfig(num_workers=0), run_config=ray.train.RunConfig(name=name)
    )
    try:
        trainer.fit()
    except StartTraceback as error:  # Ray wraps the function's own errors
        cause = error.__cause__ or error
    if cause is not None:
        raise cause


def takes_argument(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with one argument. Ray asks whether it has to be."""
    try:
        inspect.signature(function).bind({})
    except TypeError:
        return False
    return True
