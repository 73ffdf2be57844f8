"""Times as Kubernetes writes them (RFC 3339, UTC, whole seconds) and as we count them (Unix time)."""

from datetime import UTC, datetime


def unix_time(text: str | None) -> float | None:
    """Seconds since 1970 of an RFC 3339 time; None for none, or for a text that is no time (people edit statuses)."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except (ValueError, OverflowError):
        return None


def rfc3339(seconds: float) -> str:
    """The time as Kubernetes writes it, to the second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
