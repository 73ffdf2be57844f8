"""The examination of a cluster: looks at it, check by check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from spotune.crd.definition import GROUP, VERSION
from spotune_operator.cli.cluster.client import Cluster, Manifest
from spotune_operator.cli.cluster.volume_pod import Say
from spotune_operator.cli.doctor import control_plane
from spotune_operator.cli.doctor.check import Check, Hidden, failed, warning
from spotune_operator.cli.doctor.gpus import gpus
from spotune_operator.cli.doctor.image import image_pull
from spotune_operator.cli.doctor.permissions import permissions
from spotune_operator.cli.doctor.storage import storage
from spotune_operator.errors import KubernetesError, NotFoundError, ProviderError, RefusedError
from spotune_operator.observe.nodes import NodeView, node_view
from spotune_operator.providers import NONE, detect

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def examine(cluster: Cluster, storage_class: str, image: str, say: Say) -> Iterator[Check]:
    """All checks, each as soon as it is done.

    Args:
        cluster: Which one.
        storage_class: That jobs will name; empty for none.
        image: To be pulled; empty for none.
        say: Tells a person what is waited for.
    """
    try:
        version = cluster.get("/version")
    except KubernetesError as error:
        yield failed("api-server", str(error), "nothing else can be looked at until it answers")
        return
    yield control_plane.api_server(version, cluster.server)
    yield _checked("permissions", lambda: permissions(cluster.namespace, lambda body: cluster.create(_REVIEWS, body)))
    yield _checked("kuberay-crd", lambda: control_plane.kuberay_definition(_published(cluster, "ray.io/v1")))
    deployments = _visible(lambda: cluster.items("/apis/apps/v1/deployments"))
    yield control_plane.kuberay_operator(deployments)
    yield _checked("finetunejob-crd", lambda: control_plane.job_definition(_published(cluster, f"{GROUP}/{VERSION}")))
    yield control_plane.operator(deployments)
    nodes = _nodes(cluster)
    try:
        provider = NONE if isinstance(nodes, Hidden) else detect(node.provider_id for node in nodes)
    except ProviderError as error:
        provider = NONE
        yield warning("provider", error.problems[0].message, "name it in spec.cluster.provider")
    yield storage(_visible(lambda: cluster.items("/apis/storage.k8s.io/v1/storageclasses")), provider, storage_class)
    yield gpus(nodes, provider)
    if image:
        yield _checked("image", lambda: image_pull(cluster, image, say))
    yield network_policy()


def network_policy() -> Check:
    """What no cluster tells."""
    message = "whether NetworkPolicies are enforced cannot be seen; without, anybody in the cluster reaches a job's Ray"
    return warning(
        "network-policy", message, "see that the network plugin enforces them (Cilium, Calico, Azure NPM, ...)"
    )


def _checked(name: str, check: Callable[[], Check]) -> Check:
    """The check, or a failed one if the API server does not let it be made."""
    try:
        return check()
    except KubernetesError as error:
        return failed(name, str(error), "mend that, and look again")


def _visible(look: Callable[[], Sequence[Manifest]]) -> Sequence[Manifest] | Hidden:
    try:
        return look()
    except RefusedError as error:
        return Hidden(str(error).partition(". Ask ")[0])


def _nodes(cluster: Cluster) -> Sequence[NodeView] | Hidden:
    found = _visible(lambda: cluster.items("/api/v1/nodes"))
    return found if isinstance(found, Hidden) else [node_view(node) for node in found]


def _published(cluster: Cluster, group_version: str) -> Manifest | None:
    """OpenAPI of a group, which every user may read, as few may the definitions; None if there is no such group."""
    try:
        return cluster.get(f"/openapi/v3/apis/{group_version}")
    except NotFoundError:
        return None
