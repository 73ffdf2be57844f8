"""What every test shares: the same small, offline machine, whoever runs them."""

from hypothesis import HealthCheck, settings

import tests.environment  # noqa: F401

# A machine that many share may take a second over anything.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
