"""The objects that `scale.py` creates: jobs and services of the operator, and what does the same with KubeRay alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from spotune_operator.kube.client import FINETUNE_JOBS, MODEL_SERVICES, Manifest, Resource

RAY_JOBS: Final = Resource("ray.io/v1", "RayJob", "rayjobs")
RAY_SERVICES: Final = Resource("ray.io/v1", "RayService", "rayservices")
_CONTAINER: Final = {
    "image": "testcluster.local/trainer:1",
    "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
}
_SERVE_CONFIG: Final = """\
applications:
  - name: default
    import_path: application:application
    route_prefix: /
    deployments: [{name: Application, num_replicas: 1}]
"""


@dataclass(frozen=True)
class Kind:
    """A kind of objects to create.

    Attributes:
        resource: the kind.
        prefix: of the names of its objects. No prefix begins with another one.
        spec: makes the spec of one.
    """

    resource: Resource
    prefix: str
    spec: Callable[[], dict[str, Any]]

    def manifest(self, number: int, namespace: str) -> Manifest:
        """The object of a number."""
        metadata = {"name": f"{self.prefix}{number:04d}", "namespace": namespace}
        return {
            "apiVersion": self.resource.group_version,
            "kind": self.resource.kind,
            "metadata": metadata,
            "spec": self.spec(),
        }


def _finetune_job() -> dict[str, Any]:
    """A small job; without nodes it waits for its head forever."""
    return {
        "model": {"source": "/data/model"},
        "dataset": {"train": {"source": "/data/shards"}},
        "training": {"epochs": 1, "globalBatchSize": 8},
        "workers": {"count": 2},
        "storage": {"storageClassName": "shared", "size": "1Gi"},
        "cluster": {"provider": "none"},
    }


def _model_service() -> dict[str, Any]:
    """A service of a model of the Hub, with one replica on processors."""
    return {
        "model": {"source": "hf://gpt2", "revision": "607a30d783dfa663caf39e06633721c8d4cfcd7e"},
        "gpus": 0,
        "replicas": {"min": 1, "max": 1},
        "cluster": {"provider": "none"},
    }


def _ray_job() -> dict[str, Any]:
    """A RayJob whose cluster has a head and a group of two workers."""
    return {"entrypoint": "python -c 'print(1)'", "rayClusterSpec": _ray_cluster()}


def _ray_service() -> dict[str, Any]:
    return {"serveConfigV2": _SERVE_CONFIG, "rayClusterConfig": _ray_cluster()}


def _ray_cluster() -> dict[str, Any]:
    return {
        "rayVersion": "2.60.0",
        "headGroupSpec": {
            "rayStartParams": {},
            "template": {"spec": {"containers": [_CONTAINER | {"name": "ray-head"}]}},
        },
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": 0,
                "minReplicas": 0,
                "maxReplicas": 2,
                "rayStartParams": {},
                "template": {"spec": {"containers": [_CONTAINER | {"name": "ray-worker"}]}},
            }
        ],
    }


FINETUNE_JOB: Final = Kind(FINETUNE_JOBS, "job-", _finetune_job)
MODEL_SERVICE: Final = Kind(MODEL_SERVICES, "service-", _model_service)
RAY_JOB: Final = Kind(RAY_JOBS, "rayjob-", _ray_job)
RAY_SERVICE: Final = Kind(RAY_SERVICES, "rayservice-", _ray_service)
