"""What a pod asks for, as the scheduler adds it up."""

from typing import Any

import pytest

from spotune.custom_resource.pod_requests import describe_requests


def container(cpu: str = "", memory: str = "", **others: Any) -> dict[str, Any]:
    named = {"cpu": cpu, "memory": memory}
    requests = {name: amount for name, amount in named.items() if amount}
    return {"resources": {"requests": requests | others.pop("requests", {})}} | others


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({}, ""),
        ({"containers": [{"name": "a"}, {"name": "b", "resources": {}}]}, ""),
        ({"containers": [container("1", "4Gi")]}, "1 CPU and 4 GiB"),
        ({"containers": [container("500m", "768Mi"), container("100m", "512Mi")]}, "0.6 CPU and 1.2 GiB"),
        ({"containers": [container("100m", "0")]}, "0.1 CPU"),
        ({"containers": [container(memory="128974848")]}, "123 MiB"),
        (
            {"containers": [container("8", "1Ti", requests={"nvidia.com/gpu": "2", "ephemeral-storage": "10Gi"})]},
            "2 GPUs, 8 CPU, 1 TiB and 10 GiB ephemeral-storage",
        ),
        ({"containers": [container(requests={"rdma/hca": 1, "cpu": 2})]}, "2 CPU and 1 rdma/hca"),
    ],
)
def test_requests_of_all_containers_are_added_up(spec: dict[str, Any], text: str) -> None:
    assert describe_requests(spec) == text


def test_init_containers_run_one_after_the_other_beside_the_sidecars_before_them() -> None:
    sidecar = container("100m", restartPolicy="Always")
    init = [container("4"), sidecar, container("5")]
    assert describe_requests({"initContainers": init, "containers": [container("1")]}) == "5.1 CPU"
    assert describe_requests({"initContainers": init, "containers": [container("6")]}) == "6.1 CPU"


def test_requests_of_the_pod_count_instead_of_those_of_its_containers_and_overhead_is_added() -> None:
    spec = {"containers": [container("1", "1Gi")], "resources": {"requests": {"cpu": "3"}}}
    assert describe_requests(spec) == "3 CPU and 1 GiB"
    assert describe_requests(spec | {"overhead": {"cpu": "250m"}}) == "3.25 CPU and 1 GiB"
