"""A program whose second process fails, while the first one waits for it."""

from __future__ import annotations

import os
import time

if os.environ["RANK"] == "1":
    raise ValueError("the labels have 3 classes, the head has 2")
time.sleep(120)
