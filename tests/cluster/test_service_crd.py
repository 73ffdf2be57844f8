"""A real API server with our definition of ModelServices sets the defaults and refuses what the models refuse."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotune.job_file.load import load_service, parse_service
from spotune.job_file.yaml_file import Document
from spotune_testcluster.kubectl import Kubectl, KubectlError
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from tests.api.service.test_broken_service_files import WRONG_COMBINATIONS, WRONG_VALUES
from tests.api.support.service_files import FULL_SERVICE_FILE, SERVICE_FILE
from tests.cluster.definitions import apply_definitions, dry_run, explained

pytestmark = pytest.mark.cluster

BROKEN = [*WRONG_VALUES, *WRONG_COMBINATIONS]
NAMED_OTHERWISE = {"two adapters of one name": "spec.adapters[1]: Duplicate value"}
"""Error messages that do not start with `FIELD: ` and the field that the models name."""


@pytest.fixture(scope="module", autouse=True)
def _definition(cluster: ClusterUnderTest) -> None:
    apply_definitions(cluster.kubectl)


@pytest.fixture
def service(namespace: Kubectl) -> Kubectl:
    """A namespace with the small service, text-to-sql."""
    create(namespace, SERVICE_FILE)
    return namespace


def create(kubectl: Kubectl, text: str) -> None:
    """Create a service in kubectl's namespace instead of the namespace in the file."""
    kubectl("create", "--filename=-", stdin=text.replace("namespace: team, ", ""))


def patch(kubectl: Kubectl, content: dict[str, Any], *options: str) -> None:
    kubectl("patch", "ms", "text-to-sql", "--type=merge", "--patch", json.dumps(content), *options)


@pytest.mark.parametrize("text", [SERVICE_FILE, FULL_SERVICE_FILE], ids=["small", "full"])
def test_a_valid_service_is_stored_with_every_default_of_the_models(
    text: str, namespace: Kubectl, tmp_path: Path
) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(text)
    create(namespace, text)
    [stored] = namespace.get("modelservices")
    assert stored["status"] == {"observedGeneration": -1}
    service = parse_service(Document(stored))
    assert service.spec == load_service(file).spec
    assert service.spec.model_dump(exclude_unset=True) == service.spec.model_dump(exclude_none=True)


@pytest.mark.parametrize(
    ("name", "valid", "broken", "line"), BROKEN, ids=[case[0].replace(" ", "-") for case in BROKEN]
)
def test_a_service_that_the_models_refuse_is_refused_by_the_name_of_the_field(
    name: str, valid: str, broken: str, line: str, cluster: ClusterUnderTest
) -> None:
    field = line.split(":")[2].strip()
    with pytest.raises(KubectlError, match=re.escape(NAMED_OTHERWISE.get(name, f"{field}: "))):
        dry_run(cluster.kubectl, "modelservices", SERVICE_FILE.replace(valid, broken, 1))


def test_an_unknown_field_is_refused_by_its_name(cluster: ClusterUnderTest) -> None:
    with pytest.raises(KubectlError, match=re.escape('unknown field "spec.replicas.most"')):
        dry_run(cluster.kubectl, "modelservices", SERVICE_FILE.replace("max: 3", "max: 3, most: 3"))


def test_server_side_apply_merges_adapters_by_name(service: Kubectl) -> None:
    """Two field managers may each own some adapters of a service."""
    other = yaml.safe_load(SERVICE_FILE)
    other["spec"] = {"adapters": [{"name": "support", "finetuneJob": "t5-support"}]}
    service("apply", "--server-side", "--field-manager=other", "--filename=-", stdin=json.dumps(other))
    adapters = service.get("ms", "text-to-sql")["spec"]["adapters"]
    assert [adapter["name"] for adapter in adapters] == ["finance", "sales", "support"]


def test_get_shows_how_it_is(service: Kubectl) -> None:
    load = {"requestsPerSecond": 2.5, "firstTokenMillisecondsP50": 41}
    status = load | {
        "phase": "Serving",
        "replicas": "1/3",
        "url": "http://text-to-sql",
        "rayService": "spotune-text-to-sql",
    }
    model = {"location": "pvc://claim/path", "version": "abc-step-1200"}
    patch(service, {"status": status | {"model": model, "image": "serve:1"}}, "--subresource=status")
    header, row = (re.split(r" {2,}", line.strip()) for line in service("get", "ms").splitlines())
    assert header == ["NAME", "PHASE", "REPLICAS", "MODEL", "REQUESTS/S", "FIRST TOKEN (MS)", "URL", "AGE"]
    assert row[:-1] == ["text-to-sql", "Serving", "1/3", "abc-step-1200", "2.5", "41", "http://text-to-sql"]
    header, row = (re.split(r" {2,}", line.strip()) for line in service("get", "ms", "--output=wide").splitlines())
    assert header[-3:] == ["LOCATION", "RAYSERVICE", "IMAGE"]
    assert row[-3:] == ["pvc://claim/path", "spotune-text-to-sql", "serve:1"]


def test_explain_reads_like_documentation(cluster: ClusterUnderTest) -> None:
    shown = explained(cluster.kubectl, "modelservice.spec.model")
    assert "The model to serve." in shown
    assert "finetuneJob <string> Name of a FinetuneJob in the same namespace." in shown
