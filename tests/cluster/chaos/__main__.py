"""The chaos suite as a command: see `tests.cluster.chaos.command`."""

import sys

import tests.environment  # noqa: F401
from tests.cluster.chaos.command import main

if __name__ == "__main__":
    sys.exit(main())
