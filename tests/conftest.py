"""What every test shares: the same small, offline machine, whoever runs them."""

import os

# Before any library reads them, and for every child process.
os.environ.update(
    {
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
)
