"""A program that reports by `spotune_train` and keeps its own checkpoint; the model is saved by both ways."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import spotune_train

CONFIG = json.loads(os.environ["SPOTUNE_CONFIG"])
CHECKPOINT = Path(os.environ["SPOTUNE_CHECKPOINT_DIR"]) / "step.json"


def save_and_end(*_: object) -> None:
    CHECKPOINT.write_text(json.dumps(step))
    sys.exit(3)


step = json.loads(CHECKPOINT.read_text()) if CHECKPOINT.exists() else 0
signal.signal(signal.SIGTERM, save_and_end)
print(f"starts after step {step}", flush=True)  # noqa: T201 - its progress
while step < CONFIG["steps"]:
    step += 1
    time.sleep(CONFIG.get("seconds", 0.0))
    spotune_train.report(step, 1.0 / step)
    if step == CONFIG.get("saveAt"):
        CHECKPOINT.write_text(json.dumps(step))
    if step == CONFIG.get("repeatAt"):
        spotune_train.report(step, 1.0)
    if step == CONFIG.get("hangAt"):
        time.sleep(600.0)
if CONFIG.get("saves"):
    spotune_train.checkpoint.save(step, {"step": step}, wait=True)
if not CONFIG.get("isTrained"):
    (Path(os.environ["SPOTUNE_OUTPUT_DIR"]) / "model.json").write_text(json.dumps([CONFIG.get("name"), step]))
