"""Pod templates, one over the other, by the meaning of Kubernetes' strategic merge patch: what is above wins.

Mappings are merged field by field, and null takes a field away. Lists whose items have a key are merged item by item:
containers in depth, all others (volumes, variables, mounts, ...) whole, for half of one volume and half of another is
neither (Kubernetes says ``retainKeys``). Everything else is replaced. Beyond Kubernetes, because what is above may not
silently drop what a user asked for: tolerations and envFrom are united, and required node affinities must both hold.

Merging the same template again changes nothing, and everything in the upper one is in the result.
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
"""What tells the items of a list apart: ``patchMergeKey`` in k8s.io/api/core/v1, and our own for tolerations."""
_MAY_BE_LEFT_OUT: Mapping[str, Any] = {"protocol": "TCP", "key": "", "value": "", "effect": ""}
"""Parts of a key that have a default."""
_IN_DEPTH = frozenset({"containers", "ephemeralContainers", "initContainers"})
_WHOLE = frozenset({"livenessProbe", "readinessProbe", "startupProbe"})
"""Mappings of which one kind out of several is given, so that two merged would be none."""


def merge(below: PodTemplate, above: PodTemplate, place: str) -> dict[str, Any]:
    """A new template: ``below`` with ``above`` over it.

    Args:
        below: A ``v1.PodTemplateSpec``, or a part of one; it is left as it is.
        above: What wins.
        place: camelCase path of the user's template in the job, for messages.

    Raises:
        PodTemplateError: Something is a list here and a mapping there, has no key, or is a patch directive.
    """
    merged = {name: _plain(value, f"{place}.{name}") for name, value in below.items() if value is not None}
    for name, value in above.items():
        where = f"{place}.{name}"
        if name.startswith("$"):
            raise PodTemplateError(
                where, "is a directive of patches; a template holds fields only, and null removes one"
            )
        if value is None:
            merged.pop(name, None)
        elif name not in merged:
            merged[name] = _merged(name, type(value)(), value, where) if isinstance(value, dict | list) else value
        else:
            merged[name] = _merged(name, merged[name], value, where)
    return merged


def _merged(name: str, below: Any, above: Any, where: str) -> Any:
    """A field that both have."""
    if _kind(below) != _kind(above):
        raise PodTemplateError(
            where, f"is {_kind(below)} in one place and {_kind(above)} in another: write it as a v1.Pod has it"
        )
    if isinstance(above, dict):
        return merge({} if name in _WHOLE else below, above, where)
    if not isinstance(above, list):
        return above
    if name in _KEYS:
        return _merged_by_key(name, below, above, where)
    above = [_plain(item, where) for item in above]
    if name == "envFrom":
        return [*(item for item in below if item not in above), *above]
    if name == "nodeSelectorTerms" and below:
        return _both_hold(below, above, where)
    return above


def _kind(value: Any) -> str:
    return "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else "a single value"


def _plain(value: Any, where: str) -> Any:
    """A copy without nulls, so that two templates never share a part."""
    if isinstance(value, dict):
        return merge({}, value, where)
    return [_plain(item, where) for item in value if item is not None] if isinstance(value, list) else value


def _merged_by_key(name: str, below: Sequence[Any], above: Sequence[Any], where: str) -> list[Any]:
    """Items in the order in which their keys come first; of two with one key the later wins."""
    key_of = _key_reader(_KEYS[name], where)
    merged: dict[tuple[Any, ...], Any] = {}
    for item in (*below, *above):
        key = key_of(item)
        under = merged.get(key, {}) if name in _IN_DEPTH else {}
        merged[key] = merge(under, item, f"{where}[{item.get('name', key[0])}]")
    return list(merged.values())


def _key_reader(names: Sequence[str], where: str) -> Callable[[Any], tuple[Any, ...]]:
    def read(item: Any) -> tuple[Any, ...]:
        if not isinstance(item, dict):
            raise PodTemplateError(where, f"is a list of mappings with {names[0]}, not of {_kind(item)}s")
        key = tuple(item.get(name) or _MAY_BE_LEFT_OUT.get(name) for name in names)
        for name, part in zip(names, key, strict=True):
            if part is None or isinstance(part, dict | list):
                raise PodTemplateError(where, f"has an item without a {name}, which tells its items apart")
        return key

    return read


def _both_hold(below: Sequence[Any], above: Sequence[Any], where: str) -> list[Any]:
    """Terms of which one holds exactly where one of ``below`` and one of ``above`` hold.

    A term that holds all of one of ``above`` stays as it is; every other one is joined with each of them.
    """
    if any(not isinstance(term, dict) for term in (*below, *above)):
        raise PodTemplateError(where, "is a list of mappings with matchExpressions")
    joined = []
    for term in below:
        done = any(_joined(term, other, where) == term for other in above)
        joined += [term] if done else [_joined(term, other, where) for other in above]
    return joined


def _joined(term: Mapping[str, Any], other: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The term that holds where both do."""
    both = dict(term)
    for name, requirements in other.items():
        already = term.get(name, [])
        if not isinstance(already, list):
            raise PodTemplateError(f"{where}.{name}", "is a list of requirements")
        both[name] = [*already, *(requirement for requirement in requirements if requirement not in already)]
    return both
