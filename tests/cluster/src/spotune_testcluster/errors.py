"""Errors of a test cluster, in one tree. Each message is a sentence for people and includes what to do."""


class ClusterError(Exception):
    """The root of all errors that this package raises."""


class CannotRunHereError(ClusterError):
    """This machine lacks something that a cluster needs: root, Go, a Debian package, a kernel feature."""


class NotRunningError(ClusterError):
    """The cluster, node or component does not exist or is not running."""


class DidNotStartError(ClusterError):
    """A process that was started exited, or was not ready in time; the message names its log."""
