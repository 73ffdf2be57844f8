"""What every test, and every process that it starts, finds in its environment: a small, offline machine.

Imported before any library that reads it.
"""

import os

os.environ.update(
    {
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
)
