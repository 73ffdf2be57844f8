"""What a supervisor and the processes that it does not start itself agree on through their environment."""

from typing import Final

AGENT_MARKER: Final = "SPOTUNE_NODE_AGENT=1"
"""Entry in the environment of node agents and of their ranks, which outlive their Ray."""
EARLY_DRIVER_SOCKET: Final = "SPOTUNE_EARLY_DRIVER"
"""Environment variable of a Ray: path of its early driver's socket (`spotune_trainer.driver.early_start`)."""
