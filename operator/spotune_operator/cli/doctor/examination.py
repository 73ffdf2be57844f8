"""Runs all checks of a cluster, one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from spotune.crd.definition import FINETUNE_JOBS, GROUP, MODEL_SERVICES, VERSION, CustomResource
from spotune_client.cluster.client import Cluster, Manifest
from spotune_client.cluster.resources import list_objects
from spotune_client.cluster.volume_pod import Notify
from spotune_operator.cli.doctor import control_plane, job_references, service_references
from spotune_operator.cli.doctor.check import Check, Forbidden, failed, warning
from spotune_operator.cli.doctor.gpus import gpus
from spotune_operator.cli.doctor.image import image_pull
from spotune_operator.cli.doctor.permissions import permissions
from spotune_operator.cli.doctor.pools import pools
from spotune_operator.cli.doctor.references import Reference, named_objects
from spotune_operator.cli.doctor.serving import serving
from spotune_operator.cli.doctor.storage import storage
from spotune_operator.errors import KubernetesError, NotFoundError, ProviderError, RefusedError
from spotune_operator.observe.nodes import NodeView, node_view
from spotune_operator.providers import NONE, detect

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_SUBJECT_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


def examine(cluster: Cluster, storage_class: str, image: str, notify: Notify) -> Iterator[Check]:
    """Run all checks and yield each result as soon as it is available.

    Args:
        cluster: The cluster to check.
        storage_class: StorageClass that jobs will use; empty: the default.
        image: Image to pull; empty: none.
        notify: Prints a progress message.
    """
    try:
        version = cluster.get("/version")
    except KubernetesError as error:
        yield failed("api-server", str(error), "fix the connection first; all other checks need it")
        return
    yield control_plane.api_server(version, cluster.server)
    yield _check_or_failure(
        "permissions", lambda: permissions(cluster.namespace, lambda body: cluster.create(_REVIEWS, body))
    )
    yield _check_or_failure("kuberay-crd", lambda: control_plane.kuberay_definition(_published(cluster, "ray.io/v1")))
    deployments = _list_or_forbidden(lambda: cluster.items("/apis/apps/v1/deployments"))
    yield control_plane.kuberay_operator(deployments)
    yield _check_or_failure(
        "finetunejob-crd", lambda: control_plane.job_definition(_published(cluster, f"{GROUP}/{VERSION}"))
    )
    yield control_plane.operator(deployments)
    yield from _serving_checks(cluster, deployments)
    nodes = _nodes(cluster)
    try:
        provider = NONE if isinstance(nodes, Forbidden) else detect(node.provider_id for node in nodes)
    except ProviderError as error:
        provider = NONE
        yield warning("provider", error.problems[0].message, "set spec.cluster.provider")
    yield storage(
        _list_or_forbidden(lambda: cluster.items("/apis/storage.k8s.io/v1/storageclasses")), provider, storage_class
    )
    yield gpus(nodes, provider)
    jobs = _objects(cluster, FINETUNE_JOBS)
    waiting = [job for job in jobs if job_references.needs_objects(job)]
    yield from _reference_checks("jobs", FINETUNE_JOBS, waiting, job_references.references, cluster)
    checked = pools(jobs, nodes, provider)
    if checked is not None:
        yield checked
    if image:
        yield _check_or_failure("image", lambda: image_pull(cluster, image, notify))
    yield network_policy()


def _serving_checks(cluster: Cluster, deployments: Sequence[Manifest] | Forbidden) -> Iterator[Check]:
    """The checks of what ModelServices need."""
    yield _check_or_failure(
        "modelservice-crd", lambda: control_plane.service_definition(_published(cluster, f"{GROUP}/{VERSION}"))
    )
    yield _check_or_failure(
        "rayservice-crd", lambda: control_plane.ray_service_definition(_published(cluster, "ray.io/v1"))
    )
    services = _objects(cluster, MODEL_SERVICES)
    yield _check_or_failure(
        "serving", lambda: serving(deployments, services, lambda body: cluster.create(_SUBJECT_REVIEWS, body))
    )
    yield from _reference_checks("services", MODEL_SERVICES, services, service_references.references, cluster)


def _reference_checks(
    name: str,
    resource: CustomResource,
    objects: Sequence[Manifest],
    references: Callable[[Mapping[str, Any]], Iterable[Reference]],
    cluster: Cluster,
) -> Iterator[Check]:
    """The checks that objects exist which jobs or services name."""
    try:
        yield from named_objects(name, resource.kind, objects, references, cluster.get)
    except KubernetesError as error:
        yield failed(name, str(error), "fix this, then run spotune doctor again")


def _objects(cluster: Cluster, resource: CustomResource) -> Sequence[Manifest]:
    """The objects of the namespace; none if their kind is not installed or hidden, which other checks report."""
    try:
        return list_objects(cluster, resource)
    except KubernetesError:
        return []


def network_policy() -> Check:
    """A reminder: whether NetworkPolicies are enforced cannot be queried."""
    message = "cannot check whether NetworkPolicies are enforced; without them, every pod can reach a job's Ray cluster"
    return warning(
        "network-policy", message, "make sure that the network plugin enforces them (Cilium, Calico, Azure NPM, ...)"
    )


def _check_or_failure(name: str, check: Callable[[], Check]) -> Check:
    """Run a check; return a failed one if the API server rejects its request."""
    try:
        return check()
    except KubernetesError as error:
        return failed(name, str(error), "fix this, then run spotune doctor again")


def _list_or_forbidden(list_objects: Callable[[], Sequence[Manifest]]) -> Sequence[Manifest] | Forbidden:
    try:
        return list_objects()
    except RefusedError as error:
        return Forbidden(str(error).partition(". Ask ")[0])


def _nodes(cluster: Cluster) -> Sequence[NodeView] | Forbidden:
    found = _list_or_forbidden(lambda: cluster.items("/api/v1/nodes"))
    return found if isinstance(found, Forbidden) else [node_view(node) for node in found]


def _published(cluster: Cluster, group_version: str) -> Manifest | None:
    """OpenAPI document of a group; None if it is not served. All users may read it, unlike the CRDs themselves."""
    try:
        return cluster.get(f"/openapi/v3/apis/{group_version}")
    except NotFoundError:
        return None
