"""A program without `spotune_train`: it keeps its own checkpoint, and its model is a file with all steps."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

CONFIG = json.loads(os.environ["SPOTUNE_CONFIG"])
CHECKPOINT = Path(os.environ["SPOTUNE_CHECKPOINT_DIR"]) / f"steps-{os.environ['RANK']}.json"


def save_and_end(*_: object) -> None:
    """What a program does that knows of notices: save on SIGTERM."""
    CHECKPOINT.write_text(json.dumps(steps))
    sys.exit(3)


steps = json.loads(CHECKPOINT.read_text()) if CHECKPOINT.exists() else []
signal.signal(signal.SIGTERM, save_and_end)
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} starts after {len(steps)} steps", flush=True)  # noqa: T201 - its progress
while len(steps) < CONFIG["steps"]:
    steps.append(len(steps) + 1)
    time.sleep(CONFIG.get("seconds", 0.0))
    if CONFIG.get("silent"):
        time.sleep(60.0)
if "export" in CONFIG:
    for name in ("steps.json", f"steps-of-rank-{os.environ['RANK']}.json"):
        (Path(os.environ["SPOTUNE_OUTPUT_DIR"]) / name).write_text(json.dumps(steps))
