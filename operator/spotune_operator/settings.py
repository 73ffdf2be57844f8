"""What an operator is run with: one class, every wait with its name, default and reason; read from the environment."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from spotune.errors import UsageError
from spotune_operator.children.resolved_job import OPERATOR_NAMESPACE
from spotune_operator.gpu_healing.policy import GpuHealing

PREFIX: Final = "SPOTUNE_OPERATOR_"
_MORE_THAN_ZERO: Final = frozenset(
    {
        "port",
        "passes",
        "poll_seconds",
        "start_poll_seconds",
        "polls",
        "answer_seconds",
        "retry_seconds",
        "retry_max_seconds",
        "refused_seconds",
    }
)
"""With 0 of these nothing would be done, or the same without a pause."""
_HIGHEST_PORT: Final = 65535


@dataclass(frozen=True)
class Settings:
    """The operator's settings; each is the variable ``SPOTUNE_OPERATOR_<NAME>``.

    Attributes:
        image: Image of the trainer for jobs that name none; empty: the one of this version.
        ray_version: Ray of that image; empty: the one of this version.
        namespace: Where the operator itself runs, for the jobs' NetworkPolicy.
        monitoring_namespace: From where Prometheus reads the jobs' metrics; empty: no PodMonitor is made.
        watch_namespaces: Jobs of these namespaces only, with commas between them; empty: of all.
        host: Address that probes and metrics are served at.
        port: Port of the same.
        passes: Jobs that are looked at side by side.
        settle_seconds: From an event to the pass that it causes, so that events in a row cause one.
        poll_seconds: Between two looks at the progress of a job that trains. Status is at most 30 s old.
        start_poll_seconds: The same while a job starts, when much happens.
        polls: Trainers that are asked side by side.
        answer_seconds: How long a trainer may take to answer.
        unreachable_seconds: Silence after which a supervisor is not waited for any more before its pods are freed.
        stop_seconds: What a supervisor gets to commit before its pods are freed.
        retry_seconds: Wait after a pass that failed; it doubles up to ``retry_max_seconds``.
        retry_max_seconds: Longest wait.
        refused_seconds: After this time an object that the API server refused is tried again.
        heed_preemption: Whether workers are asked to go when the node problem detector of AKS says that their spot node
            is about to be taken away, for clusters where nobody else drains it in time.
        healing: Which steps against lost GPUs may be taken.
    """

    image: str = ""
    ray_version: str = ""
    namespace: str = OPERATOR_NAMESPACE
    monitoring_namespace: str = ""
    watch_namespaces: str = ""
    host: str = "0.0.0.0"  # noqa: S104 - a pod's probes come from its node
    port: int = 8080
    passes: int = 8
    settle_seconds: float = 0.1
    poll_seconds: float = 10.0
    start_poll_seconds: float = 2.0
    polls: int = 64
    answer_seconds: float = 5.0
    unreachable_seconds: float = 30.0
    stop_seconds: float = 60.0
    retry_seconds: float = 1.0
    retry_max_seconds: float = 60.0
    refused_seconds: float = 60.0
    heed_preemption: bool = False
    healing: GpuHealing = field(default_factory=GpuHealing)

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces whose jobs are looked after; one that is empty stands for all."""
        named = (name.strip() for name in self.watch_namespaces.split(","))
        return tuple(dict.fromkeys(name for name in named if name)) or ("",)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """The settings that variables name, and defaults for the rest.

        Raises:
            UsageError: A variable with our prefix is unknown, or its value is none that can be worked with.
        """
        known = {PREFIX + name.upper(): (name, default) for name, default in _defaults(cls()).items()}
        healing = {f"{PREFIX}HEAL_{name.upper()}": (name, default) for name, default in _defaults(GpuHealing()).items()}
        given = {name: text for name, text in environment.items() if name.startswith(PREFIX)}
        for name in sorted(given.keys() - known.keys() - healing.keys()):
            raise UsageError(f"{name} is not a setting; there is {', '.join([*known, *healing])}")
        values = {known[name][0]: _value(name, text, known[name][1]) for name, text in given.items() if name in known}
        steps = {
            healing[name][0]: _value(name, text, healing[name][1]) for name, text in given.items() if name in healing
        }
        return cls(**values, healing=GpuHealing(**steps))


def _defaults(settings: Any) -> dict[str, Any]:
    """Name and default of the settings that one variable can say."""
    values = {item.name: getattr(settings, item.name) for item in fields(settings)}
    return {name: value for name, value in values.items() if isinstance(value, str | int | float)}


def _value(name: str, text: str, default: Any) -> Any:
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
    setting = name.removeprefix(PREFIX).lower()
    if not math.isfinite(value) or value < 0 or (value == 0 and setting in _MORE_THAN_ZERO):
        raise UsageError(f"{name} is {text!r}: give a number {'above' if setting in _MORE_THAN_ZERO else 'from'} 0")
    if setting == "port" and value > _HIGHEST_PORT:
        raise UsageError(f"{name} is {text!r}: ports end at {_HIGHEST_PORT}")
    return value
