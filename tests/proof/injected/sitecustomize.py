"""Run by every Python process of a run that is being proven, before anything else: this folder is on its PYTHONPATH."""

import os

import break_worker  # type: ignore[import-not-found]
import recovery_moments  # type: ignore[import-not-found]
import slow_volume  # type: ignore[import-not-found]
import small_head  # type: ignore[import-not-found]

if moments := os.environ.get(recovery_moments.MOMENTS):
    recovery_moments.show_moments(moments)
if slots := os.environ.get(small_head.HEAD_SLOTS):
    small_head.limit_head(int(slots))
if directory := os.environ.get(slow_volume.VOLUME):
    slow_volume.slow_down(directory)
if name := os.environ.get(break_worker.BROKEN):
    break_worker.break_worker(name)
