"""The applications that a RayService builds: their deployments, and what is read where."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray import cloudpickle, serve
from ray._common.utils import import_attr
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as call_builder
from starlette.testclient import TestClient

from spotune.errors import JobError
from spotune_serve.deployment.application import Gateway, gateway_application, model_application
from spotune_serve.deployment.arguments import (
    GatewayArguments,
    ListedVersion,
    ModelArguments,
    gateway_config,
    model_config,
    version_configs,
)
from spotune_serve.deployment.bucket import BucketModel
from spotune_serve.deployment.config import GatewayConfig, ModelConfig
from spotune_serve.deployment.hub import HubModel
from spotune_serve.gateway.api_keys import ApiKeyFile
from tests import ROOT
from tests.pages import blocks
from tests.serve.support.served_models import SQL_TEMPLATE, save_model

GATEWAY_PATH = "spotune_serve.deployment.cluster:build_gateway"
MODEL_PATH = "spotune_serve.deployment.cluster:build_model"
GATEWAY_ARGUMENTS = {
    "name": "text-to-sql",
    "apiKeysFile": "/keys/keys",
    "requestTimeoutSeconds": 600,
    "drainSeconds": 20,
    "scalesToZero": True,
}
MODEL_ARGUMENTS = {
    "directory": "/model/export",
    "adapters": {"polite": "/adapters/polite"},
    "revision": "",
    "gpus": 1,
    "engine": "vllm",
    "batchInvariant": True,
    "drainSeconds": 20,
}


def deployment(import_path: str, **arguments: Any) -> Any:
    """The only deployment of an application, as Ray builds it from a serveConfigV2."""
    application: Any = call_builder(import_attr(import_path), json.loads(json.dumps(arguments)))
    assert isinstance(application, serve.Application)
    return application._bound_deployment


def listed(directory: Path, **fields: Any) -> dict[str, Any]:
    """A version in a user_config."""
    return {"application": "model-1", "directory": str(directory), "version": "v1", "weight": 1, **fields}


def started(*versions: dict[str, Any], **arguments: Any) -> Gateway:
    """A gateway as Ray Serve starts it in its pod."""
    gateway = Gateway(gateway_config({"name": "tiny", **arguments}))
    asyncio.run(gateway.reconfigure({"versions": list(versions)}))
    return gateway


def client_of(gateway: Gateway) -> TestClient:
    return TestClient(gateway.app)


@pytest.mark.parametrize(
    ("found", "resource"),
    [
        (lambda: deployment(GATEWAY_PATH, name="tiny"), "spotune_gateway"),
        (lambda: deployment(MODEL_PATH, directory="/model"), "spotune_replica"),
    ],
    ids=["gateway", "model"],
)
def test_each_process_takes_the_resource_of_its_node(found: Any, resource: str) -> None:
    options = found()
    assert options.ray_actor_options["resources"] == {resource: 1}
    assert options.ray_actor_options["num_cpus"] == 0
    assert options._replica_config.max_replicas_per_node == 1


def test_on_one_machine_processes_need_no_resource_of_a_node() -> None:
    applications: tuple[Any, ...] = (
        gateway_application(GatewayConfig("tiny")),
        model_application(ModelConfig(Path("/model"), replicas=2)),
    )
    found = [application._bound_deployment for application in applications]
    assert [each.ray_actor_options["resources"] for each in found] == [{}, {}]
    assert [each._replica_config.max_replicas_per_node for each in found] == [None, None]
    assert [each.num_replicas for each in found] == [1, 2]
    several: Any = gateway_application(GatewayConfig("tiny", processes=3))
    assert several._bound_deployment.num_replicas == 3


def test_gpus_go_to_replicas_alone() -> None:
    gateway, replica = deployment(GATEWAY_PATH, name="tiny"), deployment(MODEL_PATH, directory="/model", gpus=2)
    assert (gateway.ray_actor_options.get("num_gpus", 0), replica.ray_actor_options["num_gpus"]) == (0, 2)


def test_both_get_the_drain_time() -> None:
    gateway = deployment(GATEWAY_PATH, name="tiny", drainSeconds=20)
    replica = deployment(MODEL_PATH, directory="/model", drainSeconds=20)
    for each in (gateway, replica):
        assert each._deployment_config.graceful_shutdown_timeout_s == 20


def test_every_argument_reaches_the_processes() -> None:
    gateway, model = gateway_config(GATEWAY_ARGUMENTS), model_config(MODEL_ARGUMENTS)
    assert (gateway.name, gateway.api_keys_file) == ("text-to-sql", Path("/keys/keys"))
    assert (gateway.settings.request_timeout_seconds, gateway.drain_seconds, gateway.scales_to_zero) == (600, 20, True)
    assert (model.directory, model.adapters) == (Path("/model/export"), {"polite": Path("/adapters/polite")})
    assert (model.gpus, model.drain_seconds) == (1, 20)
    assert (model.engine, model.batch_invariant) == ("vllm", True)


def test_the_head_reads_neither_model_nor_keys_and_sends_plain_values() -> None:
    """None of the paths exists where the application is built."""
    for path, arguments in ((GATEWAY_PATH, GATEWAY_ARGUMENTS), (MODEL_PATH, MODEL_ARGUMENTS)):
        (config,) = deployment(path, **arguments).init_args
        assert cloudpickle.loads(cloudpickle.dumps(config)) == config


def test_the_page_names_every_argument_and_its_example_is_valid() -> None:
    page = ROOT / "docs/how-to/serve.md"
    (block,) = blocks(page, "yaml")
    gateway, model = yaml.safe_load(yaml.safe_load(block.text)["spec"]["serveConfigV2"])["applications"]
    assert (gateway["import_path"], model["import_path"]) == (GATEWAY_PATH, MODEL_PATH)
    (version,) = version_configs(gateway["deployments"][0]["user_config"])
    assert gateway_config(gateway["args"]).name == "text-to-sql"
    assert version.application == model["name"]
    assert version.directory == model_config(model["args"]).directory
    sections = (GatewayArguments, ModelArguments, ListedVersion)
    arguments = {field.alias for section in sections for field in section.model_fields.values()}
    assert {argument for argument in arguments if f"`{argument}`" not in page.read_text()} == set()


@pytest.mark.parametrize(("revision", "expected"), [("v2", "v2"), ("", "main")])
def test_a_model_on_the_hub_has_a_revision(revision: str, expected: str) -> None:
    location = {"directory": "hf://google-t5/t5-small", "revision": revision}
    assert model_config(location).directory == HubModel("google-t5/t5-small", expected)
    version = {"application": "model-1", "version": "v1", "weight": 1}
    assert version_configs({"versions": [version | location]})[0].directory == model_config(location).directory


@pytest.mark.parametrize("directory", ["s3://my.bucket/team/llama", "s3://my.bucket/team/llama/"])
def test_a_model_in_a_bucket_is_named_by_its_prefix(directory: str) -> None:
    assert model_config({"directory": directory}).directory == BucketModel("my.bucket", "team/llama")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"directory": None}, "directory: "),
        ({"directory": "s3://bucket"}, "directory: 's3://bucket' is neither a folder, nor hf://owner/name, nor s3://"),
        ({"directory": "hf://owner/name/more"}, "directory: 'hf://owner/name/more' is neither"),
        ({"directory": "/x", "model": "/x"}, "model: Extra inputs are not permitted"),
        ({"directory": "/x", "drain_second": 3}, "drain_second: "),
    ],
)
def test_a_wrong_argument_is_named_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as raised:
        deployment(MODEL_PATH, **arguments)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_two_versions_of_one_name_are_refused() -> None:
    with pytest.raises(JobError, match="versions: two versions have the same name"):
        version_configs({"versions": [listed(Path("/a")), listed(Path("/b"))]})


def test_the_gateway_reads_manifest_adapters_and_keys_in_its_own_pod(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", prompt=SQL_TEMPLATE)
    adapter = tmp_path / "polite"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    keys = tmp_path / "keys"
    keys.write_text("\nfirst key\n\n second-key \r\n")
    client = client_of(started(listed(folder, adapters={"polite": str(adapter)}), apiKeysFile=str(keys)))
    models = "/v1/models"
    assert client.get(models).status_code == 401
    assert client.get(models, headers={"Authorization": "Bearer third"}).status_code == 401
    for key in ("first key", "second-key"):
        response = client.get(models, headers={"Authorization": f"Bearer {key}"})
        assert [card["id"] for card in response.json()["data"]] == ["tiny", "polite"]
    refused = client.post("/v1/predict", json={"row": {}}, headers={"Authorization": "Bearer second-key"})
    assert "question" in refused.json()["error"]["message"]


def test_without_a_key_file_no_key_is_needed(tmp_path: Path) -> None:
    assert client_of(started(listed(save_model(tmp_path)))).get("/v1/models").status_code == 200


def test_a_gateway_does_not_start_without_a_model_or_keys(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    with pytest.raises(JobError, match=r"file with API keys .*/keys cannot be read"):
        started(listed(folder), apiKeysFile=str(tmp_path / "keys"))
    with pytest.raises(JobError, match="there is no directory"):
        started(listed(tmp_path / "missing"))


def test_a_running_gateway_outlives_a_wrong_list_of_versions(tmp_path: Path) -> None:
    gateway = started(listed(save_model(tmp_path / "model")))
    for versions in ([listed(tmp_path / "missing", version="v2")], [], [{"version": "v2"}]):
        asyncio.run(gateway.reconfigure({"versions": versions}))
        client = client_of(gateway)
        assert [card["version"] for card in client.get("/v1/models").json()["data"]] == ["v1"]
        stats = client.get("/stats").json()
        assert stats["error"] or stats["versions"]["v2"]["error"]
    asyncio.run(gateway.reconfigure({"versions": [listed(tmp_path / "model")]}))
    assert client_of(gateway).get("/stats").json()["error"] == ""


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_key_file_does_not_open_the_service(content: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(content)
    with pytest.raises(JobError, match="is empty"):
        ApiKeyFile(keys)
