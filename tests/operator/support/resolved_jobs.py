"""Resolved jobs for tests, and accessors of their pod specs."""

from collections.abc import Mapping
from typing import Any

from spotune.job import FinetuneJob
from spotune_operator.children.pod_template.layers import Pod
from spotune_operator.children.pods import head_pod, worker_capacities, worker_pod
from spotune_operator.children.resolved_job import ResolvedJob, resolve
from spotune_operator.providers import NONE, Provider
from tests.api.support.job_files import a_job


def resolved_job_of(provider: Provider = NONE, uid: str = "", **sections: Any) -> ResolvedJob:
    """A small resolved job, with sections of its spec replaced."""
    return resolve(a_job(**sections), provider, uid=uid)


def with_user_code(**training: Any) -> ResolvedJob:
    """A resolved job with a training function, and more fields of `training`."""
    spec = {"training": {"function": "train:train", **training}, "workers": {"count": 2, "gpus": 0}}
    return resolve(FinetuneJob.model_validate({"metadata": {"name": "job"}, "spec": spec}), NONE, uid="")


def worker(provider: Provider = NONE, sections: Mapping[str, Any] | None = None, **workers: Any) -> dict[str, Any]:
    """The pod spec of a worker of the first group."""
    resolved = resolved_job_of(provider, **(sections or {}), workers=workers)
    return _spec(worker_pod(resolved, worker_capacities(resolved)[0]))


def head(provider: Provider = NONE, sections: Mapping[str, Any] | None = None, **head_section: Any) -> dict[str, Any]:
    """The pod spec of the head."""
    return _spec(head_pod(resolved_job_of(provider, **(sections or {}), head=head_section)))


def _spec(pod: Pod) -> dict[str, Any]:
    spec: dict[str, Any] = pod.template["spec"]
    return spec


def container(pod: dict[str, Any], name: str) -> dict[str, Any]:
    """A container of a pod by its name."""
    found = [item for item in pod["containers"] if item["name"] == name]
    assert len(found) == 1, f"{name} of {[item['name'] for item in pod['containers']]}"
    return dict(found[0])


def environment(pod: dict[str, Any], name: str) -> dict[str, Any]:
    """Variables of a container: the value, or its source."""
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container(pod, name)["env"]}


def holds(whole: Any, part: Any, field: str = "") -> bool:
    """Whether everything in `part` is in `whole`: fields of mappings, items of lists in any order."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            name in whole and holds(whole[name], value, name) for name, value in part.items()
        )
    if isinstance(part, list) and field == "nodeSelectorTerms":  # one of them is enough for a node: each must hold ours
        return isinstance(whole, list) and bool(whole) and all(any(holds(t, p) for p in part) for t in whole)
    if isinstance(part, list):
        return isinstance(whole, list) and all(any(holds(item, wanted) for item in whole) for wanted in part)
    return bool(whole == part)
