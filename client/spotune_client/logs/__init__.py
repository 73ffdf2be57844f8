"""The logs of jobs and services."""
