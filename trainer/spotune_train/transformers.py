"""Hugging Face's `Trainer` in a training function: one callback reports, saves and resumes.

trainer = Trainer(..., callbacks=[SpotuneCallback()])
trainer.train(resume_from_checkpoint=SpotuneCallback.checkpoint())
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from spotune_train import checkpoint
from spotune_train.progress import notice, session


class SpotuneCallback(TrainerCallback):
    """Reports every step, and commits what the `Trainer` saves, also at a notice and at the end."""

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}

    @staticmethod
    def checkpoint() -> str | None:
        """Folder for `Trainer.train(resume_from_checkpoint=...)`; None at the beginning."""
        found = checkpoint.latest()
        return str(found.folder) if found is not None else None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep what is logged for the next report."""
        self._logged |= logs or {}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Report a step, and save it if the worker group has to leave or the step is the last one."""
        logged, self._logged = self._logged, {}
        session("transformers").report(logged, step=state.global_step, total_steps=state.max_steps)
        if notice() is not None or state.global_step >= state.max_steps:
            control.should_save = True
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Commit the folder that the `Trainer` has saved; with the last step, it is the trained model."""
        assert args.output_dir is not None, "the Trainer has saved there"
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        own = folder if folder.is_dir() else None
        found = session("transformers")
        if found.begin_save(state.global_step, is_sharded=False) is not None:
            found.save(own, lambda: None, wait=True)
