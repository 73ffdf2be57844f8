"""The custom resources of a Prometheus operator, without their schemas."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spotune_testcluster.kubectl import Kubectl
from tests.cluster.definitions import wait_until_served

_GROUP = "monitoring.coreos.com"


@contextmanager
def known(kubectl: Kubectl, *kinds: str) -> Iterator[None]:
    """Until the block ends, the API server has kinds such as `PodMonitor`."""
    definitions = [f"{kind.lower()}s.{_GROUP}" for kind in kinds]
    kubectl.apply(*map(_definition, kinds))
    try:
        wait_until_served(kubectl, *definitions)
        yield
    finally:
        kubectl("delete", "crd", *definitions)


def _definition(kind: str) -> dict[str, Any]:
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    plural = f"{kind.lower()}s"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{_GROUP}"},
        "spec": {
            "group": _GROUP,
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"},
            "scope": "Namespaced",
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }
