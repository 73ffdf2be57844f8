"""The operator's errors, grown from the tree of ``spotune.errors``: who has to act decides the branch.

::

    SpotuneError
    ├── JobError                     the user acts
    │   └── StalledError             a field asks for what cannot be: condition Stalled, with the field's name
    │       ├── PodTemplateError     a podTemplate that cannot be merged
    │       ├── ProviderError        nobody can tell whose nodes these are
    │       ├── ResourcesError       amounts that contradict one another
    │       ├── SourceError          a source that no pod can read
    │       └── StorageClassError    a class whose volumes cannot hold checkpoints
    └── InfrastructureError          time acts: the same pass is run again, with growing pauses
        └── KubernetesError          the API server does not answer, or not as it should
            ├── NotFoundError        there is no such object
            └── RefusedError         it does not take what we ask for, and says why

A ``StalledError`` is not tried again until the job, or what the job names, has changed.
"""

from typing import ClassVar

from spotune.errors import InfrastructureError, JobError, Problem


class StalledError(JobError):
    """A field of the job asks for what cannot be in this cluster; nothing but a change of it helps.

    Args:
        field: camelCase path as written in the YAML, e.g. ``spec.storage.storageClassName``.
        message: What is wrong with it and what to do, a sentence without the field's name.
    """

    reason: ClassVar[str] = "InvalidSpec"
    """Reason of the condition ``Stalled``, in CamelCase as ``metav1.Condition`` has it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(problems=[Problem(message, field)])
        self.field = field


class PodTemplateError(StalledError):
    """A pod template that cannot be merged with what spotune sets."""

    reason = "InvalidPodTemplate"


class ProviderError(StalledError):
    """The nodes do not say which cloud they are from."""

    reason = "UnknownProvider"


class ResourcesError(StalledError):
    """Amounts of resources that contradict one another."""

    reason = "InvalidResources"


class SourceError(StalledError):
    """A source that no pod can read."""

    reason = "InvalidSource"


class StorageClassError(StalledError):
    """A storage class whose volumes cannot hold checkpoints that several pods write."""

    reason = "UnfitStorageClass"


class KubernetesError(InfrastructureError):
    """The API server does not answer, or not as it should; the pass is run again.

    Args:
        message: In the API server's own words, if it spoke.
        status: Of HTTP; 0 if there was no answer.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NotFoundError(KubernetesError):
    """There is no such object, or no such kind."""


class RefusedError(KubernetesError):
    """The API server does not take an object, or forbids it; the job's status says so, and it is tried now and then."""
