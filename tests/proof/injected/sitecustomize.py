"""Run by every Python process of a run that is being proven, before anything else: this folder is on its PYTHONPATH."""

import os

import break_worker  # type: ignore[import-not-found]
import slow_volume  # type: ignore[import-not-found]

if directory := os.environ.get(slow_volume.VOLUME):
    slow_volume.slow_down(directory)
if name := os.environ.get(break_worker.BROKEN):
    break_worker.break_worker(name)
