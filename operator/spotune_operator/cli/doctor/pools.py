"""Checks that a node matches each pool of the jobs in the namespace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spotune.errors import JobError
from spotune.job_file.load import parse_job
from spotune.job_file.yaml_file import Document
from spotune_operator.cli.doctor.check import Check, Forbidden, passed, warning
from spotune_operator.observe.nodes import NodeView
from spotune_operator.providers import PROVIDERS, Provider, ProviderName
from spotune_operator.reconcile.pools.matching import message, unmatched


def pools(jobs: Sequence[dict[str, Any]], nodes: Sequence[NodeView] | Forbidden, provider: Provider) -> Check | None:
    """Whether a node matches each pool; None if no job has pools.

    A pool without a node is a warning: an autoscaler may create the node once a pod asks for it.

    Args:
        jobs: The FinetuneJobs as the API server returns them. Invalid ones are left out: their condition says why.
        nodes: Nodes of the cluster.
        provider: Cloud provider of the nodes.
    """
    found, count = [], 0
    for body in jobs:
        try:
            job = parse_job(Document(content={name: part for name, part in body.items() if name != "status"}))
        except JobError:
            continue
        named = job.spec.cluster.provider
        cloud = provider if named == "auto" else PROVIDERS[ProviderName(named)]
        count += len(job.spec.workers.pools)
        if job.spec.workers.pools and not isinstance(nodes, Forbidden):
            missing = unmatched(job.spec.workers.pools, nodes, cloud)
            found += [f"{job.metadata.name}: {message(missing, cloud)}"] if missing else []
    if not count:
        return None
    if isinstance(nodes, Forbidden):
        return warning("pools", f"cannot list nodes: {nodes.reason}")
    if found:
        return warning("pools", "; ".join(found), "correct the pools, or make sure that an autoscaler has such nodes")
    return passed("pools", f"a node matches each of the {count} pool(s) of jobs in this namespace")
