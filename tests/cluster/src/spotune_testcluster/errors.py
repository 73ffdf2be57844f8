"""What can go wrong with a test cluster, as one tree: a sentence for a person, always with what to do."""


class ClusterError(Exception):
    """The root: whatever this package raises on purpose."""


class CannotRunHereError(ClusterError):
    """This machine lacks something that a cluster needs: root, Go, a Debian package, a kernel feature."""


class NotRunningError(ClusterError):
    """There is no such cluster, node or component, or it is not running."""


class DidNotStartError(ClusterError):
    """Something was started and was not ready in time, or ended; the message names its log."""
