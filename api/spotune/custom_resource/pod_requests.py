"""What a pod asks a node for, in words: `1 GPU, 4 CPU and 16 GiB`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from spotune.units.quantities import Quantity

_GPU: Final = "nvidia.com/gpu"
_FIRST: Final = (_GPU, "cpu", "memory")
"""The order in which resources are named; others follow."""
_UNITS: Final = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}

Amounts = Mapping[str, float]
"""Amounts by resource, in its own unit: CPUs, bytes or devices."""


def describe_requests(spec: Mapping[str, Any]) -> str:
    """The requests of a ``v1.PodSpec``, as the scheduler adds them up; empty if it has none.

    Containers and sidecars run together; each init container runs alone, beside the sidecars before it. Source:
    https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/#resource-sharing-within-containers
    """
    sidecars: Amounts = {}
    highest: Amounts = {}
    for container in spec.get("initContainers") or ():
        beside = _add(sidecars, _requests(container))
        highest = _merge(max, highest, beside)
        if container.get("restartPolicy") == "Always":
            sidecars = beside
    running = sidecars
    for container in spec.get("containers") or ():
        running = _add(running, _requests(container))
    of_pod = {**_merge(max, highest, running), **_requests(spec)}
    total = _add(of_pod, _parsed(spec.get("overhead") or {}))
    return _enumerate(total)


def _requests(section: Mapping[str, Any]) -> Amounts:
    return _parsed((section.get("resources") or {}).get("requests") or {})


def _parsed(amounts: Mapping[str, Any]) -> Amounts:
    return {name: Quantity(str(amount)).value for name, amount in amounts.items()}


def _add(first: Amounts, second: Amounts) -> Amounts:
    return _merge(operator.add, first, second)


def _merge(combine: Callable[[float, float], float], first: Amounts, second: Amounts) -> Amounts:
    return {name: combine(first.get(name, 0.0), second.get(name, 0.0)) for name in {**first, **second}}


def _enumerate(amounts: Amounts) -> str:
    names = [name for name in _FIRST if name in amounts] + sorted(amounts.keys() - {*_FIRST})
    *before, last = [_describe(name, amounts[name]) for name in names if amounts[name]] or [""]
    return f"{', '.join(before)} and {last}" if before else last


def _describe(name: str, amount: float) -> str:
    if name == _GPU:
        return f"{amount:g} GPU" if amount == 1 else f"{amount:g} GPUs"
    if name == "cpu":
        return f"{amount:g} CPU"
    if name == "memory":
        return _bytes(amount)
    is_bytes = name == "ephemeral-storage" or name.startswith("hugepages-")
    return f"{_bytes(amount) if is_bytes else f'{amount:g}'} {name}"


def _bytes(amount: float) -> str:
    unit = next((unit for unit, size in _UNITS.items() if amount >= size), "")
    return f"{round(amount / _UNITS[unit], 1):g} {unit}" if unit else f"{amount:g} B"
