"""The parsers, one module for each of those who write what they read."""

from tests.fuzz.target import Target
from tests.fuzz.targets import answers, datasets, servers, user_files, volumes

TARGETS: tuple[Target, ...] = (
    *user_files.TARGETS,
    *datasets.TARGETS,
    *volumes.TARGETS,
    *servers.TARGETS,
    *answers.TARGETS,
)
"""All parsers."""
