"""The proof as a command: see `tests.proof.command`."""

import sys

import tests.environment  # noqa: F401
from tests.proof.command import main

if __name__ == "__main__":
    sys.exit(main())
