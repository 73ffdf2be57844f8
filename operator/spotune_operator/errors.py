"""The operator's errors, which extend ``spotune.errors``: each branch is for those who can act on it.

::

    SpotuneError
    ├── JobError                     the user acts
    │   └── StalledError             a field cannot be applied in this cluster: condition Stalled names it
    │       ├── PodTemplateError     a podTemplate that cannot be merged
    │       ├── ProviderError        the cloud of the nodes is ambiguous
    │       ├── ResourcesError       inconsistent amounts of resources
    │       ├── SourceError          a source that no pod can read
    │       └── StorageClassError    a class that is missing, or whose volumes cannot hold checkpoints
    └── InfrastructureError          no action needed: the reconcile is retried with backoff
        └── KubernetesError          the API server failed or is unreachable (``spotune.errors``)

After a ``StalledError`` the job is reconciled when it, or an object that it names, has changed, and once a minute.
"""

from typing import ClassVar

from spotune.errors import InfrastructureError as InfrastructureError
from spotune.errors import JobError, Problem
from spotune.errors import KubernetesError as KubernetesError
from spotune.errors import NotFoundError as NotFoundError
from spotune.errors import RefusedError as RefusedError


class StalledError(JobError):
    """A field of the job cannot be applied in this cluster; only a change of the field helps.

    Args:
        field: camelCase path as written in the YAML, e.g. ``spec.storage.storageClassName``.
        message: What is wrong and what to do: the rest of a sentence that begins with the field's name.
    """

    reason: ClassVar[str] = "InvalidSpec"
    """Reason of the condition ``Stalled``."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(problems=[Problem(message, field)])
        self.field = field


class PodTemplateError(StalledError):
    """A pod template that cannot be merged with the fields that spotune sets."""

    reason = "InvalidPodTemplate"


class ProviderError(StalledError):
    """The cloud of the nodes is ambiguous."""

    reason = "UnknownProvider"


class ResourcesError(StalledError):
    """Inconsistent amounts of resources."""

    reason = "InvalidResources"


class SourceError(StalledError):
    """A source that no pod can read."""

    reason = "InvalidSource"


class StorageClassError(StalledError):
    """A storage class that is missing, or whose volumes several pods cannot write checkpoints to."""

    reason = "UnfitStorageClass"
