"""What every test shares: the same small, offline machine, whoever runs them."""

import os

from hypothesis import HealthCheck, settings

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

# A machine that many share may take a second over anything.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
