"""A program whose second process fails as its argument says, while the first one waits for it."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

if os.environ["RANK"] == "1":
    match sys.argv[1]:
        case "error":
            raise ValueError("the labels have 3 classes, the head has 2")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        case "peer":
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.3]:41234")
time.sleep(120)
