"""Downloads the state and the logs of a job from its bucket, then becomes a command that reads them.

Usage:
    python -m spotune_trainer.bucket.read_state URL DIRECTORY COMMAND...

Writes nothing to the bucket, so a run is not disturbed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from spotune.errors import SpotuneError
from spotune_trainer.bucket.client import BucketError, open_bucket
from spotune_trainer.bucket.state_mirror import pull_job
from spotune_trainer.job_directory.layout import JobDirectory


def main(arguments: list[str]) -> None:
    """Entry point of a temporary pod. Returns only by an exit."""
    url, root, *command = arguments
    directory = JobDirectory(Path(root))
    directory.root.mkdir(parents=True, exist_ok=True)
    try:
        pull_job(open_bucket(url), directory, folders=())
    except (BucketError, SpotuneError) as error:
        sys.exit(f"storage.bucket: {error}")
    os.execvp(command[0], command)  # noqa: S606 - the command of the pod


if __name__ == "__main__":
    main(sys.argv[1:])
