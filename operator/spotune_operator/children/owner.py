"""The custom resource that children belong to: it gives them their name, labels and owner reference."""

from dataclasses import dataclass
from typing import Any

from spotune.custom_resource import API_VERSION


@dataclass(frozen=True)
class Owner:
    """A FinetuneJob or a ModelService.

    Attributes:
        kind: Its kind.
        name: Its name.
        namespace: Its namespace.
        label: Label of all its objects; the value is its name.
        child_name: Name of its children.
        uid: Its ``metadata.uid``; empty outside a cluster: the children then have no owner.
    """

    kind: str
    name: str
    namespace: str
    label: str
    child_name: str
    uid: str = ""

    @property
    def selector(self) -> dict[str, str]:
        """The label that all its objects have."""
        return {self.label: self.name}

    def labels(self, component: str) -> dict[str, str]:
        """Labels of a child or a pod; ``component`` is its role."""
        return {
            "app.kubernetes.io/name": "spotune",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": component,
            "app.kubernetes.io/managed-by": "spotune",
            **self.selector,
        }

    def pod_selector(self, component: str) -> dict[str, str]:
        """The labels that select its pods of one component."""
        return self.selector | {"app.kubernetes.io/component": component}

    def child(
        self, api_version: str, kind: str, component: str, *, suffix: str = "", owned: bool = True
    ) -> dict[str, Any]:
        """API version, kind and metadata of a child.

        The owner reference lets the garbage collector delete the child with its owner. It does not block the deletion
        of the owner, because blocking needs a permission for finalizers that the operator does not have.

        Args:
            api_version: API version of the child.
            kind: Kind of the child.
            component: Role of the child, for its labels.
            suffix: Appended to the name, for a second child of the same kind.
            owned: Whether the child is deleted with its owner.
        """
        metadata: dict[str, Any] = {
            "name": f"{self.child_name}{suffix}",
            "namespace": self.namespace,
            "labels": self.labels(component),
        }
        if owned and self.uid:
            owner = {"apiVersion": API_VERSION, "kind": self.kind, "name": self.name, "uid": self.uid}
            metadata["ownerReferences"] = [owner | {"controller": True, "blockOwnerDeletion": False}]
        return {"apiVersion": api_version, "kind": kind, "metadata": metadata}
