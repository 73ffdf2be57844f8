"""By which a supervisor knows the processes that outlive their Ray."""

from typing import Final

AGENT_MARKER: Final = "SPOTUNE_NODE_AGENT=1"
"""Entry in the environment of node agents and of their ranks."""
