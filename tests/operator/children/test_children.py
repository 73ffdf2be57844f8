"""The children of a job: names, owners, network access, and the job file of the trainer."""

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotune.custom_resource import API_VERSION
from spotune.errors import JobError
from spotune.fingerprint import fingerprint
from spotune.job import KIND, FinetuneJob
from spotune.job_file.load import load_job, parse_job
from spotune.job_file.yaml_file import Document
from spotune_operator.children import build_children
from spotune_operator.children.config import config_map, trainer_job
from spotune_operator.children.network import network_policy
from spotune_operator.children.raycluster import Replicas, ray_cluster
from spotune_operator.children.resolved_job import RAY_VERSION, ResolvedJob, resolve
from spotune_operator.children.storage import volume_claim
from spotune_operator.errors import SourceError, StorageClassError
from spotune_operator.providers import AKS, GKE, NONE, PROVIDERS, Provider
from tests import ROOT
from tests.api.support.job_files import a_job
from tests.operator.support.generated_specs import generated
from tests.operator.support.resolved_jobs import container, environment, head, resolved_job_of, worker

UID = "8a1f0c52-4a0c-4f0e-9a57-1d6f5c1f4d11"


def named(name: str) -> ResolvedJob:
    job = a_job().model_dump(exclude_unset=True)
    return resolve(FinetuneJob.model_validate(job | {"metadata": {"name": name}}), NONE)


def kinds(children: list[dict[str, Any]]) -> list[str]:
    return [child["kind"] for child in children]


def test_a_job_is_a_claim_a_config_a_policy_and_a_cluster() -> None:
    assert kinds(build_children(resolved_job_of(), Replicas(1))) == [
        "PersistentVolumeClaim",
        "ConfigMap",
        "NetworkPolicy",
        "RayCluster",
    ]


def test_pod_monitor_needs_a_monitoring_namespace() -> None:
    resolved = resolve(a_job(), NONE, monitoring_namespace="monitoring")
    assert kinds(build_children(resolved, Replicas(1)))[-1] == "PodMonitor"
    (rule,) = [rule for rule in network_policy(resolved)["spec"]["ingress"] if _namespace(rule) == "monitoring"]
    assert [port["port"] for port in rule["ports"]] == [8090, 8080]


def test_children_belong_to_the_job_without_blocking_its_deletion() -> None:
    for child in build_children(resolved_job_of(uid=UID, storage={"retain": False}), Replicas(1)):
        (owner,) = child["metadata"]["ownerReferences"]
        assert owner["uid"] == UID
        assert owner["controller"]
        assert not owner["blockOwnerDeletion"]
        assert "finalizers" not in child["metadata"]


def test_a_retained_volume_has_no_owner() -> None:
    claim = volume_claim(resolved_job_of(uid=UID))
    assert claim is not None
    assert "ownerReferences" not in claim["metadata"]


def test_existing_claim_is_mounted_and_none_is_created() -> None:
    storage: dict[str, Any] = {"storage": {"existingClaim": "mine"}}
    assert volume_claim(resolved_job_of(**storage)) is None
    for pod in (head(sections=storage), worker(sections=storage)):
        assert {"name": "data", "persistentVolumeClaim": {"claimName": "mine"}} in pod["volumes"]


BUCKET = {"bucket": "s3://bucket/job/", "credentials": {"secretName": "keys", "endpoint": "http://s3"}}
IN_A_BUCKET: dict[str, Any] = {
    "model": {"source": "/models/t5", "task": "seq2seq"},
    "dataset": {"train": {"source": "s3://data/shards"}, "credentials": {"secretName": "data"}},
    "storage": BUCKET,
}


def test_a_bucket_replaces_the_volume_by_a_directory_of_each_pod() -> None:
    sections = IN_A_BUCKET
    assert "PersistentVolumeClaim" not in kinds(build_children(resolved_job_of(**sections), Replicas(1)))
    for pod in (head(sections=sections), worker(sections=sections)):
        assert {"name": "data", "emptyDir": {}} in pod["volumes"]
    command = container(head(sections=sections), "supervisor")["command"]
    assert command[-2:] == ["--bucket", "s3://bucket/job"]
    assert resolved_job_of(**sections).output == "s3://bucket/job/export"


def test_a_disk_of_the_template_replaces_the_directory_of_a_pod_but_not_the_volume() -> None:
    disk = {"name": "data", "hostPath": {"path": "/mnt/nvme"}}
    template = {"spec": {"volumes": [disk]}}
    assert disk in worker(sections=IN_A_BUCKET, podTemplate=template)["volumes"]
    assert disk not in worker(podTemplate=template)["volumes"]


def test_every_container_gets_the_credentials_of_the_bucket_beside_those_of_the_data() -> None:
    for pod, names in (
        (head(sections=IN_A_BUCKET), ("ray-head", "supervisor")),
        (worker(sections=IN_A_BUCKET), ("ray-worker",)),
    ):
        for name in names:
            secrets = [each["secretRef"]["name"] for each in container(pod, name)["envFrom"]]
            assert secrets == ["data", "keys"]
            assert environment(pod, name)["S3_ENDPOINT_URL"] == "http://s3"


def test_a_bucket_has_no_volume_that_sources_could_be_relative_to() -> None:
    relative = IN_A_BUCKET | {"dataset": {"train": {"source": "shards"}}}
    with pytest.raises(SourceError, match=r"spec\.dataset\.train\.source: shards is relative to the shared volume"):
        resolved_job_of(**relative)


def test_relative_code_of_a_job_in_a_bucket_belongs_in_the_image() -> None:
    metadata, spec = {"name": "own"}, {"training": {"function": "train:train", "code": "code"}, "storage": BUCKET}
    with pytest.raises(SourceError, match=r"spec\.training\.code: code is relative .*: put it into the image"):
        resolve(FinetuneJob.model_validate({"metadata": metadata, "spec": spec}), NONE)


def test_storage_class_is_the_jobs_else_the_providers_else_the_clusters() -> None:
    def storage_class(resolved: ResolvedJob) -> str | None:
        claim = volume_claim(resolved)
        assert claim is not None
        found: str | None = claim["spec"].get("storageClassName")
        return found

    assert storage_class(resolved_job_of(GKE, storage={"storageClassName": "mine"})) == "mine"
    assert storage_class(resolved_job_of(GKE)) == "standard-rwx"
    assert storage_class(resolved_job_of(NONE)) is None


def test_smb_class_is_refused_before_anything_is_created() -> None:
    with pytest.raises(StorageClassError, match=r"spec\.storage\.storageClassName: azurefile is Azure Files over SMB"):
        resolved_job_of(AKS, storage={"storageClassName": "azurefile"})


def test_image_is_the_jobs_else_the_operators_else_this_versions() -> None:
    def image_and_ray(**cluster: str) -> tuple[str, str]:
        resolved = resolve(a_job(cluster=cluster), NONE, image="registry.example/ours:2", ray_version="2.61.0")
        return resolved.image, resolved.ray_version

    assert image_and_ray() == ("registry.example/ours:2", "2.61.0")
    assert image_and_ray(image="mine:1", rayVersion="2.59.0") == ("mine:1", "2.59.0")
    assert (resolved_job_of().image, resolved_job_of().ray_version) == (
        f"spotune/trainer:{version('spotune')}",
        RAY_VERSION,
    )


@pytest.mark.parametrize("name", ["7b", "a" * 40, "1" * 40])
def test_child_name_of_any_job_is_valid_for_kuberay(name: str) -> None:
    cluster = ray_cluster(named(name), Replicas(1))["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", cluster)
    assert len(cluster) <= 50  # KubeRay cuts longer names, and then its Secret has another name than the cluster


def test_job_may_use_a_secret_of_its_own_name() -> None:
    assert ray_cluster(named("hf"), Replicas(1))["metadata"]["name"] != "hf"


def test_job_file_is_valid_and_has_the_fingerprint_of_its_directory(tmp_path: Path) -> None:
    model = {"source": "models/t5", "task": "seq2seq", "tokenSecretRef": {"name": "hf", "key": "token"}}
    dataset = {"train": {"source": "shards"}, "credentials": {"secretName": "bucket"}}
    resolved = resolved_job_of(model=model, dataset=dataset, suspend=True, workers={"count": 3, "gpus": 0})
    file = tmp_path / "job.yaml"
    file.write_text(config_map(resolved)["data"]["job.yaml"])
    read = load_job(file)
    assert resolved.directory.name == f"job-{fingerprint(read)[:8]}"
    assert read.spec.model.source == "/data/models/t5"
    assert read.spec.workers.count == 3


def test_job_file_without_defaults_is_the_same_job() -> None:
    """Also with the defaults that the API server has added, and those of a section that holds nothing else."""
    compared = 0
    for spec in generated(600):
        try:
            resolved = resolve(parse_job(job_document(spec)), NONE)
        except (JobError, RecursionError):
            continue
        content = yaml.safe_load(config_map(resolved)["data"]["job.yaml"])
        assert parse_job(Document(content=content)) == trainer_job(resolved.job)
        compared += 1
    assert compared > 100


def job_document(spec: dict[str, Any]) -> Document:
    return Document(content={"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "job"}, "spec": spec})


def test_job_file_has_no_field_that_only_the_definition_has_added() -> None:
    given = resolved_job_of(workers={"count": 3})
    served = resolved_job_of(workers={"count": 3, "nodeCheck": "auto", "min": "auto"}, retry={}, checkpoint={"keep": 2})
    assert config_map(served) == config_map(given)


def test_job_file_does_not_change_with_pod_fields() -> None:
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
    assert config_map(resolved_job_of(**changed)) == config_map(resolved_job_of(workers={}))


def test_a_home_folder_is_refused_by_field() -> None:
    with pytest.raises(SourceError, match=r"spec\.model\.source: ~/model is in a home folder"):
        resolved_job_of(model={"source": "~/model", "task": "seq2seq"})


def test_scaling_changes_the_number_of_replicas_alone() -> None:
    none, four = (ray_cluster(resolved_job_of(workers={"count": 4}), Replicas(workers)) for workers in (0, 4))
    assert none["spec"]["workerGroupSpecs"][0]["replicas"] == 0
    none["spec"]["workerGroupSpecs"][0]["replicas"] = 4
    assert none == four


def groups(resolved: ResolvedJob, replicas: Replicas) -> dict[str, Any]:
    """The worker groups by name."""
    return {group["groupName"]: group for group in ray_cluster(resolved, replicas)["spec"]["workerGroupSpecs"]}


@pytest.mark.parametrize("capacity", ["spot", "on-demand"])
def test_one_capacity_type_has_one_group(capacity: str) -> None:
    assert list(groups(resolved_job_of(workers={"capacity": capacity}), Replicas(1, on_demand=1))) == ["workers"]


def test_groups_of_spot_then_on_demand_have_their_own_replicas() -> None:
    found = groups(
        resolved_job_of(AKS, workers={"count": 4, "capacity": "spot-then-on-demand"}), Replicas(4, on_demand=2)
    )
    assert {name: (group["replicas"], group["maxReplicas"]) for name, group in found.items()} == {
        "workers": (4, 4),
        "on-demand": (2, 4),
    }


@pytest.mark.parametrize("provider", PROVIDERS.values(), ids=lambda provider: provider.name)
def test_groups_of_spot_then_on_demand_equal_those_of_one_capacity_type(provider: Provider) -> None:
    template = {"spec": {"nodeSelector": {"pool": "gpu"}, "tolerations": [{"key": "mine", "operator": "Exists"}]}}

    def pods(capacity: str) -> dict[str, Any]:
        workers = {"gpus": 2, "capacity": capacity, "podTemplate": template}
        found = groups(resolved_job_of(provider, workers=workers), Replicas(1, on_demand=1))
        return {name: (group["template"], group["rayStartParams"]) for name, group in found.items()}

    both = pods("spot-then-on-demand")
    assert both == {"workers": pods("spot")["workers"], "on-demand": pods("on-demand")["workers"]}
    assert both["workers"] != both["on-demand"]


def test_worker_has_one_ray_cpu_a_gpu_or_one_without_gpus() -> None:
    def parameters(gpus: int) -> dict[str, str]:
        cluster = ray_cluster(
            resolved_job_of(workers={"gpus": gpus, "resources": {"limits": {"cpu": "6"}}}), Replicas(1)
        )
        found: dict[str, str] = cluster["spec"]["workerGroupSpecs"][0]["rayStartParams"]
        return found

    assert (parameters(0)["num-cpus"], parameters(0)["num-gpus"]) == ("1", "0")
    assert (parameters(4)["num-cpus"], parameters(4)["num-gpus"]) == ("6", "4")


def test_head_has_no_ray_cpus() -> None:
    assert ray_cluster(resolved_job_of(), Replicas(1))["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_cluster_in_a_queue_is_an_elastic_job_of_kueue() -> None:
    waiting, free = (
        ray_cluster(resolved_job_of(cluster=cluster), Replicas(1)) for cluster in ({"queueName": "gpu"}, {})
    )
    assert waiting["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
    assert waiting["metadata"]["annotations"] == {"kueue.x-k8s.io/elastic-job": "true"}
    assert not any("kueue" in text for text in (*free["metadata"]["labels"], *free["metadata"].get("annotations", {})))
    assert waiting["spec"] == free["spec"]
    assert "suspend" not in free["spec"]  # Kueue's in a queue, and the reconciler's elsewhere


def test_only_the_job_and_the_operator_reach_its_pods() -> None:
    policy = network_policy(resolved_job_of())
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
    resolved = resolved_job_of()
    selector = network_policy(resolved)["spec"]["podSelector"]["matchLabels"].items()
    cluster = ray_cluster(resolved, Replicas(1))["spec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert selector <= group["template"]["metadata"]["labels"].items()


def test_the_ray_version_is_that_of_the_trainers_pins() -> None:
    pins = (ROOT / "constraints" / "trainer.txt").read_text()
    assert re.search(r"^ray(?:\[[^]]*\])?==(\S+)", pins, re.MULTILINE)[1] == RAY_VERSION  # type: ignore[index]
