"""The operator's settings, read from the environment: every wait has a name, a default and a reason."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Final, Literal, get_args

from spotune.errors import UsageError
from spotune_operator.prices import NodePrice, parse_prices

OPERATOR_NAMESPACE: Final = "spotune-system"
"""Default namespace of the chart."""

Step = Literal["cordon", "restart-device-plugin", "drain", "delete-node"]

GPU_HEALING_STEPS: Final[tuple[Step, ...]] = get_args(Step)


@dataclass(frozen=True)
class GpuHealing:
    """Which steps the operator may take on a node that has lost GPUs, and when.

    Attributes:
        cordon: Cordon the node, so that it gets no new pods.
        restart_device_plugin: Delete the device plugin's pod, so that its successor detects the GPUs again.
        drain: Evict the node's pods, each with its own grace period; workers commit in theirs.
        delete_node: Delete the Node, so that a cluster autoscaler returns the machine.
        after_seconds: Seconds from the loss to the first step, because GPUs are missing for a while when the device
            plugin is updated.
        step_seconds: Seconds that a step has to succeed before the next one is taken.
        drain_seconds: The same for the drain, which disruption budgets may delay.
        relapse_seconds: If a node loses GPUs again within this time after it was healed, healing starts with the step
            after the one that did not last.
        at_once: If more nodes than this have lost GPUs at the same time, no step is taken: the cause is then a driver
            or the device plugin, and not the nodes.
    """

    cordon: bool = False
    restart_device_plugin: bool = False
    drain: bool = False
    delete_node: bool = False
    after_seconds: float = 120.0
    step_seconds: float = 120.0
    drain_seconds: float = 600.0
    relapse_seconds: float = 3600.0
    at_once: int = 2

    def __post_init__(self) -> None:
        """Validate that no step lacks the one that it needs.

        Raises:
            UsageError: A drain without a cordon, or the deletion of a node without a drain.
        """
        if self.drain and not self.cordon:
            raise UsageError("GPU healing: drain needs cordon, or the pods are scheduled to the same node again")
        if self.delete_node and not self.drain:
            raise UsageError("GPU healing: delete_node needs drain, or pods lose their node without notice")

    @property
    def steps(self) -> tuple[Step, ...]:
        """The allowed steps, in order."""
        allowed = (self.cordon, self.restart_device_plugin, self.drain, self.delete_node)
        return tuple(step for step, is_allowed in zip(GPU_HEALING_STEPS, allowed, strict=True) if is_allowed)


PREFIX: Final = "SPOTUNE_OPERATOR_"
_MUST_BE_POSITIVE: Final = frozenset(
    {
        "port",
        "max_concurrent_reconciles",
        "poll_seconds",
        "start_poll_seconds",
        "max_concurrent_polls",
        "poll_timeout_seconds",
        "retry_seconds",
        "retry_max_seconds",
        "rejected_retry_seconds",
    }
)
"""With 0, these would stop all work, or repeat it without a pause."""
_MAX_PORT: Final = 65535


@dataclass(frozen=True)
class Settings:
    """The operator's settings; each is the variable ``SPOTUNE_OPERATOR_<NAME>``, unless its text names another one.

    Attributes:
        image: Image of the trainer for jobs that name none; empty: the one of this version.
        serving: Whether ModelServices are reconciled.
        serve_image: Image for ModelServices that name none; empty: the one of this version.
        serve_vllm_image: The same, with vLLM, for replicas with GPUs whose model vLLM may serve; empty: the one of this
            version.
        ray_version: Version of Ray in these images; empty: the one of this version.
        namespace: The operator's own namespace, for the NetworkPolicy of jobs.
        monitoring_namespace: Namespace of the Prometheus that scrapes jobs; empty: no PodMonitor is created.
        watch_namespaces: Comma-separated namespaces whose jobs are reconciled; empty: all.
        host: Address of the probes and metrics.
        port: Port of the probes and metrics.
        max_concurrent_reconciles: Number of concurrent reconciles. Each waits for the API server most of the time:
            with 8, an API server that was not busy kept new jobs waiting. Each applies up to four objects at once.
        debounce_seconds: Delay from an event to its reconcile, so that a burst of events causes one reconcile.
        poll_seconds: Interval of polls of a job that trains. The status promises to be at most 30 s old.
        start_poll_seconds: Interval of polls while a job starts, when its state changes often.
        max_concurrent_polls: Number of concurrent polls.
        poll_timeout_seconds: Timeout of a poll.
        unreachable_seconds: Duration of failed polls after which the operator stops waiting for a supervisor, for
            example before it deletes its pods.
        stop_seconds: Time that a supervisor has to commit before its pods are deleted.
        retry_seconds: Wait after a failed reconcile; it doubles up to ``retry_max_seconds``.
        retry_max_seconds: Maximum wait after a failed reconcile.
        rejected_retry_seconds: Wait until an object that the API server rejected is applied again.
        spot_start_seconds: Assumed time from the request of spot nodes that are there to the next new step.
        on_demand_start_seconds: The same for on-demand nodes. Deadlines hold while they come within it.
        heed_preemption: Whether running workers are deleted gracefully when the node problem detector of AKS announces
            that their spot node is reclaimed; for clusters where nothing else drains it in time.
        prices: Prices of nodes as a JSON list (see ``prices.parse_prices``); empty: none are known.
        notifications: Who is notified of changes of phases, as JSON (notifications/targets.py); empty: nobody.
        healing: The steps that may be taken on nodes that have lost GPUs.
    """

    image: str = ""
    serving: bool = False
    serve_image: str = ""
    serve_vllm_image: str = ""
    ray_version: str = ""
    namespace: str = OPERATOR_NAMESPACE
    monitoring_namespace: str = ""
    watch_namespaces: str = ""
    host: str = "0.0.0.0"  # noqa: S104 - the kubelet probes the pod's address
    port: int = 8080
    max_concurrent_reconciles: int = 24
    debounce_seconds: float = 0.1
    poll_seconds: float = 10.0
    start_poll_seconds: float = 2.0
    max_concurrent_polls: int = 64
    poll_timeout_seconds: float = 5.0
    unreachable_seconds: float = 30.0
    stop_seconds: float = 60.0
    retry_seconds: float = 1.0
    retry_max_seconds: float = 60.0
    rejected_retry_seconds: float = 60.0
    spot_start_seconds: float = 300.0
    on_demand_start_seconds: float = 600.0
    heed_preemption: bool = False
    prices: str = ""
    notifications: str = ""
    healing: GpuHealing = field(default_factory=GpuHealing)

    @cached_property
    def node_prices(self) -> Sequence[NodePrice]:
        """The prices of nodes.

        Raises:
            UsageError: They are invalid.
        """
        return parse_prices(self.prices)

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces whose jobs are reconciled; a single empty name means all."""
        named = (name.strip() for name in self.watch_namespaces.split(","))
        return tuple(dict.fromkeys(name for name in named if name)) or ("",)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """The settings of these variables, and defaults for the others.

        Raises:
            UsageError: A variable with the prefix is unknown, or its value is invalid.
        """
        known = {PREFIX + name.upper(): (name, default) for name, default in _defaults(cls()).items()}
        healing = {f"{PREFIX}HEAL_{name.upper()}": (name, default) for name, default in _defaults(GpuHealing()).items()}
        given = {name: text for name, text in environment.items() if name.startswith(PREFIX)}
        for name in sorted(given.keys() - known.keys() - healing.keys()):
            raise UsageError(f"{name} is not a setting; the settings are {', '.join([*known, *healing])}")
        values = {known[name][0]: _value(name, text, *known[name]) for name, text in given.items() if name in known}
        steps = {
            healing[name][0]: _value(name, text, *healing[name]) for name, text in given.items() if name in healing
        }
        settings = cls(**values, healing=GpuHealing(**steps))
        _ = settings.node_prices  # invalid ones are refused at the start
        return settings


def _defaults(settings: Any) -> dict[str, Any]:
    """Names and defaults of the settings that one variable can hold."""
    values = {item.name: getattr(settings, item.name) for item in fields(settings)}
    return {name: value for name, value in values.items() if isinstance(value, str | int | float)}


def _value(name: str, text: str, setting: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise UsageError(f"{name} is {text!r}: give true or false")
        return text.lower() == "true"
    if isinstance(default, str):
        return text
    try:
        value = type(default)(text)
    except ValueError as error:
        kind = "a whole number" if isinstance(default, int) else "a number"
        raise UsageError(f"{name} is {text!r}: give {kind}") from error
    if not math.isfinite(value) or value < 0 or (value == 0 and setting in _MUST_BE_POSITIVE):
        raise UsageError(f"{name} is {text!r}: give a number {'above' if setting in _MUST_BE_POSITIVE else 'from'} 0")
    if setting == "port" and value > _MAX_PORT:
        raise UsageError(f"{name} is {text!r}: the highest port is {_MAX_PORT}")
    return value
