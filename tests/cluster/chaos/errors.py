"""What keeps a fault from being injected."""

from spotune_testcluster.errors import ClusterError


class NothingToHitError(ClusterError):
    """What a fault hits does not exist at this time, for example because another fault has removed it."""
