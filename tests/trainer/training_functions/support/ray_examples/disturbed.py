"""Calls a function of an example, and ends rank 1 before one of its reports, in the first generation only."""

from __future__ import annotations

import importlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import ray.train

from spotune_trainer.training_functions.session import Session


def main(config: dict[str, Any]) -> None:
    """Call `function` of `module` with `config`; rank 1 dies before the report of the step `killAt`."""
    module = importlib.import_module(config["module"])
    report: Any = Session.report
    happened = Path(config["happened"])

    def report_or_die(session: Session, *arguments: Any, **options: Any) -> None:
        step = options.get("step") or session.step + 1
        is_here = ray.train.get_context().get_world_rank() == 1
        if is_here and step == config["killAt"] and not happened.exists():
            happened.touch()
            while (commit := session._running_commit) is not None and not commit.has_ended:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        report(session, *arguments, **options)

    Session.report = report_or_die  # type: ignore[method-assign, assignment]
    getattr(module, config["function"])(config["config"])
