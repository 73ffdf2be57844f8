"""Merges pod templates with the semantics of Kubernetes' strategic merge patch: the override wins.

Mappings are merged by field, and null removes a field. Lists whose items have a key are merged by item: containers are
merged field by field; all other items (volumes, variables, mounts, ...) are replaced, because a mixture of two volumes
is no valid volume (Kubernetes: ``retainKeys``). Other values are replaced.

Beyond Kubernetes, an override must not silently drop what the user asked for: tolerations and envFrom are united, and
required node affinities must both match.

Merging the same override again changes nothing, and the result contains everything in the override.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spotune_operator.errors import PodTemplateError

PodTemplate = Mapping[str, Any]

_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "env": ("name",),
    "ephemeralContainers": ("name",),
    "hostAliases": ("ip",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ports": ("containerPort", "protocol"),
    "resourceClaims": ("name",),
    "schedulingGates": ("name",),
    "tolerations": ("key", "value", "effect"),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeDevices": ("devicePath",),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
"""Keys of list items: ``patchMergeKey`` in k8s.io/api/core/v1, and an own key for tolerations."""
_KEY_DEFAULTS: Mapping[str, Any] = {"protocol": "TCP", "key": "", "value": "", "effect": ""}
"""Parts of keys with a default."""
_MERGED_BY_FIELD = frozenset({"containers", "ephemeralContainers", "initContainers"})
_REPLACED = frozenset({"livenessProbe", "readinessProbe", "startupProbe"})
"""Mappings with exactly one of several handlers; a mixture of two would be invalid."""


def merge(base: PodTemplate, override: PodTemplate, path: str) -> dict[str, Any]:
    """A new template: ``base`` with ``override`` merged over it.

    Args:
        base: A ``v1.PodTemplateSpec``, or a part of one; it is not changed.
        override: The template that wins.
        path: camelCase path of the user's template in the job, for messages.

    Raises:
        PodTemplateError: The types of a field differ, an item has no key, or a field is a patch directive.
    """
    merged = {name: _without_nulls(value, f"{path}.{name}") for name, value in base.items() if value is not None}
    for name, value in override.items():
        field = f"{path}.{name}"
        if name.startswith("$"):
            raise PodTemplateError(field, "is a patch directive; a template has fields only, and null removes a field")
        if value is None:
            merged.pop(name, None)
        elif name not in merged:
            merged[name] = _merge_field(name, type(value)(), value, field) if isinstance(value, dict | list) else value
        else:
            merged[name] = _merge_field(name, merged[name], value, field)
    return merged


def _merge_field(name: str, base: Any, override: Any, path: str) -> Any:
    """The merged value of a field that both templates have."""
    if _type_name(base) != _type_name(override):
        types = f"{_type_name(base)} in one template and {_type_name(override)} in another"
        raise PodTemplateError(path, f"is {types}: use the type of a v1.Pod")
    if isinstance(override, dict):
        return merge({} if name in _REPLACED else base, override, path)
    if not isinstance(override, list):
        return override
    if name in _KEYS:
        return _merge_by_key(name, base, override, path)
    override = [_without_nulls(item, path) for item in override]
    if name == "envFrom":
        return [*(item for item in base if item not in override), *override]
    if name == "nodeSelectorTerms" and base:
        return _intersection(base, override, path)
    return override


def _type_name(value: Any) -> str:
    return "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else "a single value"


def _without_nulls(value: Any, path: str) -> Any:
    """A deep copy without nulls, so that two templates never share a part."""
    if isinstance(value, dict):
        return merge({}, value, path)
    return [_without_nulls(item, path) for item in value if item is not None] if isinstance(value, list) else value


def _merge_by_key(name: str, base: Sequence[Any], override: Sequence[Any], path: str) -> list[Any]:
    """The items in the order in which their keys first appear; of two items with one key the later wins."""
    key_of = _key_reader(_KEYS[name], path)
    merged: dict[tuple[Any, ...], Any] = {}
    for item in (*base, *override):
        key = key_of(item)
        existing = merged.get(key, {}) if name in _MERGED_BY_FIELD else {}
        merged[key] = merge(existing, item, f"{path}[{item.get('name', key[0])}]")
    return list(merged.values())


def _key_reader(names: Sequence[str], path: str) -> Callable[[Any], tuple[Any, ...]]:
    def read(item: Any) -> tuple[Any, ...]:
        if not isinstance(item, dict):
            raise PodTemplateError(path, f"must be a list of mappings with {names[0]}, and has {_type_name(item)}")
        key = tuple(item.get(name) or _KEY_DEFAULTS.get(name) for name in names)
        for name, part in zip(names, key, strict=True):
            if part is None or isinstance(part, dict | list):
                raise PodTemplateError(path, f"has an item without a {name}, the key of its items")
        return key

    return read


def _intersection(base: Sequence[Any], override: Sequence[Any], path: str) -> list[Any]:
    """Terms that match exactly the nodes that match both ``base`` and ``override``.

    A term of ``base`` that contains a term of ``override`` stays unchanged; every other one is joined with each of
    them.
    """
    if any(not isinstance(term, dict) for term in (*base, *override)):
        raise PodTemplateError(path, "must be a list of mappings with matchExpressions")
    joined = []
    for term in base:
        is_contained = any(_joined(term, other, path) == term for other in override)
        joined += [term] if is_contained else [_joined(term, other, path) for other in override]
    return joined


def _joined(term: Mapping[str, Any], other: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The term that matches where both match."""
    joined = dict(term)
    for name, requirements in other.items():
        already = term.get(name, [])
        if not isinstance(already, list):
            raise PodTemplateError(f"{path}.{name}", "must be a list of requirements")
        joined[name] = [*already, *(requirement for requirement in requirements if requirement not in already)]
    return joined
