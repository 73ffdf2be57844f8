"""The application that a RayService builds: its deployments, and what is read where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray import cloudpickle, serve
from ray._common.utils import import_attr
from ray.exceptions import ActorDiedError
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as call_builder
from starlette.testclient import TestClient

from spotune.errors import JobError, UsageError
from spotune_serve.deployment.application import Gateway, build_application
from spotune_serve.deployment.cluster import ReplicasArguments, ServingArguments, service_config
from spotune_serve.deployment.config import Scaling, ServiceConfig
from spotune_serve.deployment.hub import HubModel
from spotune_serve.gateway.settings import read_api_keys
from tests import ROOT
from tests.pages import blocks
from tests.serve.support.ray_handle import ScriptedHandle
from tests.serve.support.scripted_backend import ScriptedBackend
from tests.serve.support.served_models import SQL_TEMPLATE, save_model

IMPORT_PATH = "spotune_serve.deployment.cluster:build"
ALL_ARGUMENTS = {
    "directory": "/model/export",
    "name": "text-to-sql",
    "adapters": {"polite": "/adapters/polite"},
    "revision": "main",
    "replicas": {"min": 0, "max": 4, "targetOngoingRequests": 8},
    "gpus": 1,
    "gatewayReplicas": 2,
    "apiKeysFile": "/keys/keys",
    "requestTimeoutSeconds": 600,
    "drainSeconds": 20,
}


def deployments(**arguments: Any) -> tuple[serve.Deployment, serve.Deployment]:
    """The deployments of gateway and replicas, as Ray builds them from a serveConfigV2."""
    args = json.loads(json.dumps({"directory": "/model", **arguments}))
    application: Any = call_builder(import_attr(IMPORT_PATH), args)
    gateway = application._bound_deployment
    return gateway, gateway.init_args[1]._bound_deployment


def autoscaling(**replicas: Any) -> Any:
    options: Any = deployments(replicas=replicas)[1]
    return options._deployment_config.autoscaling_config


def configured(**arguments: Any) -> ServiceConfig:
    return service_config(ServingArguments.model_validate(arguments))


def gateway_client(**arguments: Any) -> TestClient:
    """A client of a gateway as its pod starts it."""
    handle = ScriptedHandle(ScriptedBackend([5, 6]), ActorDiedError())
    return TestClient(Gateway(configured(**arguments), handle).__serve_build_asgi_app__())


def test_each_process_takes_the_resource_of_its_node() -> None:
    for deployment, resource in zip(deployments(), ("spotune_gateway", "spotune_replica"), strict=True):
        options: Any = deployment
        assert options.ray_actor_options["resources"] == {resource: 1}
        assert options.ray_actor_options["num_cpus"] == 0
        assert options._replica_config.max_replicas_per_node == 1


def test_on_one_machine_processes_need_no_resource_of_a_node() -> None:
    gateway: Any = build_application(ServiceConfig(Path("/model"), scaling=Scaling(2, 2)))._bound_deployment
    replica = gateway.init_args[1]._bound_deployment
    for deployment in (gateway, replica):
        assert (deployment.ray_actor_options["resources"], deployment._replica_config.max_replicas_per_node) == (
            {},
            None,
        )
    assert (gateway.num_replicas, replica.num_replicas) == (1, 2)


def test_gpus_go_to_replicas_alone() -> None:
    gateway, replica = (deployment.ray_actor_options or {} for deployment in deployments(gpus=2))
    assert (gateway.get("num_gpus", 0), replica["num_gpus"]) == (0, 2)


def test_numbers_of_gateways_and_replicas_are_those_of_the_arguments() -> None:
    gateway, replica = deployments(gatewayReplicas=2, replicas={"min": 3, "max": 3})
    assert (gateway.num_replicas, replica.num_replicas) == (2, 3)
    assert autoscaling(min=3, max=3) is None


def test_both_get_the_drain_time() -> None:
    for deployment in deployments(drainSeconds=20):
        options: Any = deployment
        assert options._deployment_config.graceful_shutdown_timeout_s == 20


def test_replicas_follow_the_load_between_minimum_and_maximum() -> None:
    found = autoscaling(min=1, max=4, targetOngoingRequests=6)
    assert (found.min_replicas, found.initial_replicas, found.max_replicas) == (1, 1, 4)
    assert found.target_ongoing_requests == 6
    assert found.look_back_period_s > found.metrics_interval_s, "Ray would refuse this in a later version"
    assert found.upscale_delay_s < found.downscale_delay_s


def test_a_service_that_scales_to_zero_starts_with_one_replica() -> None:
    """So a model that cannot be loaded is noticed before the first request."""
    found = autoscaling(min=0, max=4)
    assert (found.min_replicas, found.initial_replicas) == (0, 1)


def test_every_argument_reaches_the_processes() -> None:
    config = configured(**ALL_ARGUMENTS)
    assert config.directory == Path("/model/export")
    assert (config.name, config.adapters) == ("text-to-sql", {"polite": Path("/adapters/polite")})
    assert (config.gateway.request_timeout_seconds, config.drain_seconds) == (600, 20)
    assert config.api_keys_file == Path("/keys/keys")
    assert config.scaling.scales_to_zero


def test_the_head_reads_neither_model_nor_keys_and_sends_plain_values() -> None:
    """None of the paths exists where the application is built."""
    gateway, replica = deployments(**ALL_ARGUMENTS)
    config = gateway.init_args[0]
    assert replica.init_args == (config,)
    assert cloudpickle.loads(cloudpickle.dumps(config)) == config == configured(**ALL_ARGUMENTS)


def test_the_page_names_every_argument_and_its_example_is_valid() -> None:
    page = ROOT / "docs/how-to/serve.md"
    (block,) = blocks(page, "yaml")
    (application,) = yaml.safe_load(yaml.safe_load(block.text)["spec"]["serveConfigV2"])["applications"]
    assert application["import_path"] == IMPORT_PATH
    assert configured(**application["args"]).scaling.max_replicas == 4
    arguments = {field.alias for field in ServingArguments.model_fields.values()} - {"replicas"}
    arguments |= {f"replicas.{field.alias}" for field in ReplicasArguments.model_fields.values()}
    assert {argument for argument in arguments if f"`{argument}`" not in page.read_text()} == set()


@pytest.mark.parametrize("name", ["", "mine"])
def test_a_model_on_the_hub_is_named_by_its_repository_or_the_argument(name: str) -> None:
    config = configured(directory="hf://google-t5/t5-small", revision="v2", name=name)
    assert config.directory == HubModel("google-t5/t5-small", "v2")
    assert config.name == (name or "t5-small")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"directory": None}, "directory: "),
        ({"directory": "s3://bucket/model"}, "directory: 's3://bucket/model' is neither a folder nor hf://owner/name"),
        ({"directory": "hf://owner/name/more"}, "directory: 'hf://owner/name/more' is neither"),
        ({"replicas": {"min": 3, "max": 2}}, "replicas.min: 3 is more than max, 2"),
        ({"replicas": {"min": 0, "max": 0}}, "replicas.max: "),
        ({"model": "/x"}, "model: Extra inputs are not permitted"),
        ({"drain_second": 3}, "drain_second: "),
        ({"gatewayReplicas": 0}, "gatewayReplicas: "),
    ],
)
def test_a_wrong_argument_is_named_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as raised:
        deployments(**arguments)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_gateway_reads_manifest_adapters_and_keys_in_its_own_pod(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", prompt=SQL_TEMPLATE)
    adapter = tmp_path / "polite"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    keys = tmp_path / "keys"
    keys.write_text("\nfirst key\n\n second-key \r\n")
    client = gateway_client(directory=str(folder), adapters={"polite": str(adapter)}, apiKeysFile=str(keys))
    models = "/v1/models"
    assert client.get(models).status_code == 401
    assert client.get(models, headers={"Authorization": "Bearer third"}).status_code == 401
    for key in ("first key", "second-key"):
        response = client.get(models, headers={"Authorization": f"Bearer {key}"})
        assert [card["id"] for card in response.json()["data"]] == ["tiny", "polite"]
    refused = client.post("/v1/predict", json={"row": {}}, headers={"Authorization": "Bearer second-key"})
    assert "question" in refused.json()["error"]["message"]


def test_without_a_key_file_no_key_is_needed(tmp_path: Path) -> None:
    assert gateway_client(directory=str(save_model(tmp_path))).get("/v1/models").status_code == 200


def test_a_gateway_does_not_start_without_its_model_or_keys(tmp_path: Path) -> None:
    folder = str(save_model(tmp_path / "model"))
    with pytest.raises(JobError, match=r"file with API keys .*/keys cannot be read"):
        gateway_client(directory=folder, apiKeysFile=str(tmp_path / "keys"))
    with pytest.raises(UsageError, match="there is no directory"):
        gateway_client(directory=str(tmp_path / "missing"))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_key_file_does_not_open_the_service(content: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(content)
    with pytest.raises(JobError, match="is empty"):
        read_api_keys(keys)
