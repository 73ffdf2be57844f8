"""The children of a job: their names, whom they belong to, who may reach them, and the job that the trainer reads."""

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from spotune.fingerprint import fingerprint
from spotune.job import FinetuneJob
from spotune.job_file.load import load_job
from spotune_operator.children import build_children
from spotune_operator.children.config import config_map
from spotune_operator.children.network import network_policy
from spotune_operator.children.raycluster import Replicas, ray_cluster
from spotune_operator.children.resolved_job import RAY_VERSION, PlacedJob, place
from spotune_operator.children.storage import volume_claim
from spotune_operator.errors import SourceError, StorageClassError
from spotune_operator.providers import AKS, GKE, NONE, PROVIDERS, Provider
from tests.api.support.job_files import a_job
from tests.operator.support.resolved_jobs import head, placed_job, worker

ROOT = Path(__file__).parent.parent.parent
UID = "8a1f0c52-4a0c-4f0e-9a57-1d6f5c1f4d11"


def named(name: str) -> PlacedJob:
    job = a_job().model_dump(exclude_unset=True)
    return place(FinetuneJob.model_validate(job | {"metadata": {"name": name}}), NONE)


def kinds(children: list[dict[str, Any]]) -> list[str]:
    return [child["kind"] for child in children]


def test_a_job_is_a_claim_a_config_a_policy_and_a_cluster() -> None:
    assert kinds(build_children(placed_job(), Replicas(1))) == [
        "PersistentVolumeClaim",
        "ConfigMap",
        "NetworkPolicy",
        "RayCluster",
    ]


def test_prometheus_reads_metrics_only_where_it_is_named() -> None:
    placed = place(a_job(), NONE, monitoring_namespace="monitoring")
    assert kinds(build_children(placed, Replicas(1)))[-1] == "PodMonitor"
    (rule,) = [rule for rule in network_policy(placed)["spec"]["ingress"] if _namespace(rule) == "monitoring"]
    assert [port["port"] for port in rule["ports"]] == [8090, 8080]


def test_children_belong_to_the_job_without_blocking_its_deletion() -> None:
    for child in build_children(placed_job(uid=UID, storage={"retain": False}), Replicas(1)):
        (owner,) = child["metadata"]["ownerReferences"]
        assert owner["uid"] == UID
        assert owner["controller"]
        assert not owner["blockOwnerDeletion"]
        assert "finalizers" not in child["metadata"]


def test_a_retained_volume_has_no_owner() -> None:
    claim = volume_claim(placed_job(uid=UID))
    assert claim is not None
    assert "ownerReferences" not in claim["metadata"]


def test_a_claim_of_the_users_is_mounted_and_none_is_made() -> None:
    storage: dict[str, Any] = {"storage": {"existingClaim": "mine"}}
    assert volume_claim(placed_job(**storage)) is None
    for pod in (head(sections=storage), worker(sections=storage)):
        assert {"name": "data", "persistentVolumeClaim": {"claimName": "mine"}} in pod["volumes"]


def test_the_class_is_the_jobs_or_the_providers_or_the_clusters() -> None:
    def storage_class(placed: PlacedJob) -> str | None:
        claim = volume_claim(placed)
        assert claim is not None
        found: str | None = claim["spec"].get("storageClassName")
        return found

    assert storage_class(placed_job(GKE, storage={"storageClassName": "mine"})) == "mine"
    assert storage_class(placed_job(GKE)) == "standard-rwx"
    assert storage_class(placed_job(NONE)) is None


def test_smb_is_refused_before_anything_is_made() -> None:
    with pytest.raises(StorageClassError, match=r"spec\.storage\.storageClassName: azurefile is Azure Files over SMB"):
        placed_job(AKS, storage={"storageClassName": "azurefile"})


def test_the_image_is_the_jobs_or_the_operators_or_that_of_this_version() -> None:
    def image_and_ray(**cluster: str) -> tuple[str, str]:
        placed = place(a_job(cluster=cluster), NONE, image="registry.example/ours:2", ray_version="2.61.0")
        return placed.image, placed.ray_version

    assert image_and_ray() == ("registry.example/ours:2", "2.61.0")
    assert image_and_ray(image="mine:1", rayVersion="2.59.0") == ("mine:1", "2.59.0")
    assert (placed_job().image, placed_job().ray_version) == (f"spotune/trainer:{version('spotune')}", RAY_VERSION)


@pytest.mark.parametrize("name", ["7b", "a" * 40, "1" * 40])
def test_kuberay_takes_the_name_of_any_job_as_it_is(name: str) -> None:
    cluster = ray_cluster(named(name), Replicas(1))["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", cluster)
    assert len(cluster) <= 50  # KubeRay cuts longer names, and then its Secret has another name than the cluster


def test_a_job_may_name_a_secret_like_itself() -> None:
    assert ray_cluster(named("hf"), Replicas(1))["metadata"]["name"] != "hf"


def test_the_trainer_is_given_a_job_that_it_takes_with_the_fingerprint_of_its_folder(tmp_path: Path) -> None:
    model = {"source": "models/t5", "task": "seq2seq", "tokenSecretRef": {"name": "hf", "key": "token"}}
    dataset = {"train": {"source": "shards"}, "credentials": {"secretName": "bucket"}}
    placed = placed_job(model=model, dataset=dataset, suspend=True, workers={"count": 3, "gpus": 0})
    file = tmp_path / "job.yaml"
    file.write_text(config_map(placed)["data"]["job.yaml"])
    read = load_job(file)
    assert placed.directory.name == f"job-{fingerprint(read)[:8]}"
    assert read.spec.model.source == "/data/models/t5"
    assert read.spec.workers.count == 3


def test_the_trainers_job_stays_when_only_pods_change() -> None:
    changed: dict[str, Any] = {
        "workers": {
            "podTemplate": {"spec": {"nodeSelector": {"pool": "gpu"}}},
            "capacity": "spot-then-on-demand",
            "onDemandAfter": "1m",
        },
        "head": {"resources": {"requests": {"cpu": "2"}}},
        "storage": {"size": "1Ti"},
        "cleanup": {"cluster": "keep"},
        "cluster": {"image": "other"},
    }
    assert config_map(placed_job(**changed)) == config_map(placed_job(workers={}))


def test_a_home_folder_is_refused_by_field() -> None:
    with pytest.raises(SourceError, match=r"spec\.model\.source: ~/model is in a home folder"):
        placed_job(model={"source": "~/model", "task": "seq2seq"})


def test_scaling_changes_the_number_of_replicas_alone() -> None:
    none, four = (ray_cluster(placed_job(workers={"count": 4}), Replicas(workers)) for workers in (0, 4))
    assert none["spec"]["workerGroupSpecs"][0]["replicas"] == 0
    none["spec"]["workerGroupSpecs"][0]["replicas"] = 4
    assert none == four


def groups(placed: PlacedJob, replicas: Replicas) -> dict[str, Any]:
    """The worker groups by name."""
    return {group["groupName"]: group for group in ray_cluster(placed, replicas)["spec"]["workerGroupSpecs"]}


@pytest.mark.parametrize("capacity", ["spot", "on-demand"])
def test_one_kind_of_node_is_one_group(capacity: str) -> None:
    assert list(groups(placed_job(workers={"capacity": capacity}), Replicas(1, on_demand=1))) == ["workers"]


def test_each_group_of_spot_then_on_demand_has_its_own_number_of_pods_up_to_the_jobs() -> None:
    found = groups(placed_job(AKS, workers={"count": 4, "capacity": "spot-then-on-demand"}), Replicas(4, on_demand=2))
    assert {name: (group["replicas"], group["maxReplicas"]) for name, group in found.items()} == {
        "workers": (4, 4),
        "on-demand": (2, 4),
    }


@pytest.mark.parametrize("provider", PROVIDERS.values(), ids=lambda provider: provider.name)
def test_groups_of_spot_then_on_demand_are_those_of_jobs_with_one_kind_of_node(provider: Provider) -> None:
    template = {"spec": {"nodeSelector": {"pool": "gpu"}, "tolerations": [{"key": "mine", "operator": "Exists"}]}}

    def pods(capacity: str) -> dict[str, Any]:
        workers = {"gpus": 2, "capacity": capacity, "podTemplate": template}
        found = groups(placed_job(provider, workers=workers), Replicas(1, on_demand=1))
        return {name: (group["template"], group["rayStartParams"]) for name, group in found.items()}

    both = pods("spot-then-on-demand")
    assert both == {"workers": pods("spot")["workers"], "on-demand": pods("on-demand")["workers"]}
    assert both["workers"] != both["on-demand"]


def test_ray_counts_a_worker_process_for_every_gpu_or_one_for_a_pod_without() -> None:
    def parameters(gpus: int) -> dict[str, str]:
        cluster = ray_cluster(placed_job(workers={"gpus": gpus, "resources": {"limits": {"cpu": "6"}}}), Replicas(1))
        found: dict[str, str] = cluster["spec"]["workerGroupSpecs"][0]["rayStartParams"]
        return found

    assert (parameters(0)["num-cpus"], parameters(0)["num-gpus"]) == ("1", "0")
    assert (parameters(4)["num-cpus"], parameters(4)["num-gpus"]) == ("6", "4")


def test_the_head_has_no_room_for_workers() -> None:
    assert ray_cluster(placed_job(), Replicas(1))["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_a_cluster_waits_in_the_queue_that_the_job_names_and_may_grow_there() -> None:
    waiting, free = (ray_cluster(placed_job(cluster=cluster), Replicas(1)) for cluster in ({"queueName": "gpu"}, {}))
    assert waiting["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
    assert waiting["metadata"]["annotations"] == {"kueue.x-k8s.io/elastic-job": "true"}
    assert not any("kueue" in text for text in (*free["metadata"]["labels"], *free["metadata"].get("annotations", {})))
    assert waiting["spec"] == free["spec"]
    assert "suspend" not in free["spec"]  # Kueue's in a queue, and the reconciler's elsewhere


def test_only_the_job_and_the_operator_reach_its_pods() -> None:
    policy = network_policy(placed_job())
    spec = policy["spec"]
    assert spec["policyTypes"] == ["Ingress"]
    own, operator = spec["ingress"]
    assert own == {"from": [{"podSelector": spec["podSelector"]}]}
    assert _namespace(operator) == "spotune-system"
    assert [port["port"] for port in operator["ports"]] == [8090, 8265]


def _namespace(rule: dict[str, Any]) -> str:
    labels: dict[str, str] = rule["from"][0].get("namespaceSelector", {}).get("matchLabels", {})
    return labels.get("kubernetes.io/metadata.name", "")


def test_the_policy_covers_every_pod_of_the_cluster() -> None:
    placed = placed_job()
    selector = network_policy(placed)["spec"]["podSelector"]["matchLabels"].items()
    cluster = ray_cluster(placed, Replicas(1))["spec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert selector <= group["template"]["metadata"]["labels"].items()


def test_the_ray_version_is_that_of_the_trainers_pins() -> None:
    pins = (ROOT / "constraints" / "trainer.txt").read_text()
    assert re.search(r"^ray(?:\[[^]]*\])?==(\S+)", pins, re.MULTILINE)[1] == RAY_VERSION  # type: ignore[index]
