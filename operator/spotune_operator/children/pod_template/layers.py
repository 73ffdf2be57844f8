"""The three layers of a pod template: defaults, the user's template, enforced fields. The later layer wins.

The product's promises depend on the enforced fields: placement, grace period, volumes, commands, and the settings with
which Ray detects a lost head or worker quickly. All other fields are defaults that the user's template overrides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotune.custom_resource.pods import ResourcesSpec
from spotune_operator.children.pod_template.resources import Amounts, ray_resources
from spotune_operator.children.pod_template.strategic_merge import PodTemplate, merge
from spotune_operator.errors import PodTemplateError


@dataclass(frozen=True)
class PodSection:
    """The section of a spec that describes a kind of pod.

    Attributes:
        path: camelCase path of the section, for messages: ``spec.workers``.
        pod_template: Its ``podTemplate``.
        resources: Its ``resources``.
    """

    path: str
    pod_template: PodTemplate
    resources: ResourcesSpec


@dataclass(frozen=True)
class Pod:
    """A pod template, and the resources of its Ray container."""

    template: dict[str, Any]
    resources: Amounts


def merged_template(
    section: PodSection, defaults: Mapping[str, Any], metadata: Mapping[str, Any], enforced: Mapping[str, Any]
) -> dict[str, Any]:
    """The pod template, merged of the three layers.

    Args:
        section: The user's layer.
        defaults: The default ``v1.PodSpec``, with all of spotune's containers.
        metadata: The enforced metadata.
        enforced: The enforced ``v1.PodSpec``.

    Raises:
        PodTemplateError: The user's template cannot be merged.
    """
    path = f"{section.path}.podTemplate"
    # An empty `spec:` is null in YAML. It must not remove the defaults.
    given = {name: part for name, part in section.pod_template.items() if part is not None}
    for name in sorted(given.keys() - {"metadata", "spec"}):
        raise PodTemplateError(f"{path}.{name}", "is not a field of a pod template: use metadata and spec")
    template = merge({"metadata": {}, "spec": defaults}, given, path)
    _refuse_missing_images(template, [container["name"] for container in defaults["containers"]], path)
    return merge(template, {"metadata": metadata, "spec": enforced}, path)


def container_resources(
    section: PodSection, container: str, defaults: Mapping[str, str], gpus: int, gpus_advice: str
) -> Amounts:
    """``v1.ResourceRequirements`` of a Ray container.

    Args:
        section: The user's layer.
        container: Name of the container.
        defaults: Requests for resources that the section does not name.
        gpus: Number of GPUs of the container.
        gpus_advice: Which field to use for GPUs, for the message about ``nvidia.com/gpu`` in ``resources``.

    Raises:
        ResourcesError: A request exceeds its limit, or GPUs are among the resources.
    """
    template = _resources_of(section.pod_template, container)
    return ray_resources(section.resources, template, defaults, gpus, section.path, gpus_advice)


def _refuse_missing_images(template: Mapping[str, Any], own_names: Sequence[str], path: str) -> None:
    """Refuse a container without an image: its name is probably a misspelt name of one of spotune's containers."""
    for container in template["spec"].get("containers", []):
        if container["name"] not in own_names and not container.get("image"):
            names = " and ".join(own_names)
            reason = (
                f"has no image, and is not one of spotune's containers ({names}): give an image or correct the name"
            )
            raise PodTemplateError(f"{path}.spec.containers[{container['name']}]", reason)


def _resources_of(template: Mapping[str, Any], container: str) -> dict[str, Any]:
    """``resources`` of a container in the user's template; empty if they are malformed, which the merge refuses."""
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    for item in containers if isinstance(containers, list) else []:
        if isinstance(item, dict) and item.get("name") == container and isinstance(item.get("resources"), dict):
            return dict(item["resources"])
    return {}
