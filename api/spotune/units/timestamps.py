"""Conversion between RFC 3339 as Kubernetes writes it (UTC, whole seconds) and Unix time."""

from datetime import UTC, datetime


def unix_time(text: str | None) -> float | None:
    """Unix time of an RFC 3339 time; None without one, or if it is invalid (people edit statuses)."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except (ValueError, OverflowError):
        return None


def rfc3339(seconds: float) -> str:
    """RFC 3339 of a Unix time, in whole seconds."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
