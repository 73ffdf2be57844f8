"""Labels and names of jobs, services and their pods: the operator or a user sets them, clients find objects by them."""

from typing import Final

JOB_LABEL: Final = "spotune.dev/job"
"""Label of all pods of a job; the value is its name."""
SERVICE_LABEL: Final = "spotune.dev/service"
"""Label of all pods of a service; the value is its name."""
TEAM_LABEL: Final = "spotune.dev/team"
"""Label of a job, set by its user, with the name of a team."""
COMPONENT_LABEL: Final = "app.kubernetes.io/component"
"""Label with the component of a pod."""
GROUP_LABEL: Final = "ray.io/group"
"""Label of KubeRay with the worker group of a pod."""
CLUSTER_LABEL: Final = "ray.io/cluster"
"""Label of KubeRay with the RayCluster of a pod."""

HEAD_COMPONENT: Final = "head"
"""Component of the pod with Ray's control plane."""
GATEWAY: Final = "gateway"
"""Component and worker group of a service's gateway."""
REPLICAS: Final = "replicas"
"""Component of a service's replicas."""

SUPERVISOR_CONTAINER: Final = "supervisor"
"""Container of a job's head pod that restarts drivers and serves progress and logs."""
HEAD_CONTAINER: Final = "ray-head"
WORKER_CONTAINER: Final = "ray-worker"
DATA_VOLUME: Final = "data"
"""Volume of a job's pods with its directory."""
PROGRESS_PORT: Final = 8090
"""Port of the supervisor."""
