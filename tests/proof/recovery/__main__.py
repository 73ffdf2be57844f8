"""The proof of recovery as a command: see `tests.proof.recovery.command`."""

import sys

import tests.environment  # noqa: F401
from tests.proof.recovery.command import main

if __name__ == "__main__":
    sys.exit(main())
