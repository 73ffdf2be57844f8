"""The tests with other versions as a command: see `tests.versions.command`."""

import sys

from tests.versions.command import main

if __name__ == "__main__":
    sys.exit(main())
