"""Tests of the whole repository; folders mirror the packages."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The root of the repository."""
