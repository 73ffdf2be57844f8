"""Computes what a job needs before it runs: parameters, memory, ZeRO stage, micro-batch size, checkpoint interval."""

from spotune.plan.checkpoint_interval import checkpoint_interval_seconds
from spotune.plan.devices import machine_memory_bytes
from spotune.plan.execution import ExecutionPlan, resolve_execution

__all__ = ["ExecutionPlan", "checkpoint_interval_seconds", "machine_memory_bytes", "resolve_execution"]
