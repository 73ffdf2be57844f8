"""Generated specs on a real API server: compared with the models; accepted ones also become jobs.

`SPOTUNE_TEST_SPECS` is the number of specs that are sent by dry-run (10,000 take two minutes),
`SPOTUNE_TEST_LIVE_SPECS` the number of jobs that are created from accepted specs.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import aiohttp
import pytest

from spotune.crd import CUSTOM_RESOURCES
from spotune.custom_resource import API_VERSION
from spotune.errors import JobError
from spotune.job import KIND
from spotune.job_file.load import parse_job, parse_service
from spotune.job_file.yaml_file import Document
from spotune_operator.kube.client import FINETUNE_JOBS, Kube, Manifest
from spotune_operator.main import login
from spotune_operator.providers import PROVIDERS
from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from tests.cluster.definitions import apply_definitions
from tests.cluster.operator_install import no_operator
from tests.cluster.whole_operator import WholeOperator, whole_operator
from tests.operator.support.event_loop import run
from tests.operator.support.generated_specs import KINDS, Spec, generated

pytestmark = pytest.mark.cluster

PLURALS = {resource.kind: resource.plural for resource in CUSTOM_RESOURCES}
NUMBER = int(os.environ.get("SPOTUNE_TEST_SPECS", "300"))
LIVE = int(os.environ.get("SPOTUNE_TEST_LIVE_SPECS", "20"))
AT_ONCE = 16
QUIET_SECONDS = 15.0
SETTLED_SECONDS = 180.0

ONLY_THE_SERVER_REFUSES = re.compile(
    r"must be of type integer(,string)?: \"number\""  # Go's integers end at 2^63
    r"|Too long: may not be more than 64 bytes"  # CEL rules need a maximum length of texts
)
ONLY_THE_MODELS_REFUSE = {
    "spec.adapter.lora.targetModules": "a structural schema has no union of a word and a list",
    "spec.execution.compile": "a rule cannot read a field that is a word or a truth value",
    "spec.retry.backoff.max": "CEL's durations know no days",
}
"""Checks that the definition cannot express; the operator performs them."""


@dataclass(frozen=True)
class Verdict:
    """The API server's response to a spec.

    Attributes:
        sent: The job or service.
        status: The HTTP status.
        answer: The object as it would be stored, or the error.
    """

    sent: Manifest
    status: int
    answer: Manifest

    @property
    def is_taken(self) -> bool:
        return self.status == 201


@pytest.fixture(scope="module", autouse=True)
def _without_hands(cluster: ClusterUnderTest) -> Iterator[None]:
    """The definitions, the storage classes of the providers, and no controller that creates pods or volumes."""
    machine = cluster.machine_for("stopping KubeRay")
    apply_definitions(cluster.kubectl)
    classes = [provider.storage_class for provider in PROVIDERS.values() if provider.storage_class]
    cluster.kubectl.apply(*(_class_of_nobody(name) for name in classes))
    for component in ("kuberay-operator", "provisioner"):
        machine.component("stop", component)
    try:
        with no_operator(cluster):
            yield
    finally:
        for component in ("provisioner", "kuberay-operator"):
            machine.component("start", component)
        cluster.kubectl("delete", "storageclass", *classes)


def _class_of_nobody(name: str) -> Manifest:
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name},
        "provisioner": "example.org/nobody",
    }


@pytest.fixture(autouse=True)
def _credentials(cluster: ClusterUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubectl.kubeconfig))


@pytest.mark.parametrize("kind", KINDS)
def test_api_server_and_models_agree_about_generated_specs(
    kind: str, namespace: Kubectl, took: dict[str, float]
) -> None:
    start = time.monotonic()
    verdicts = run(tried(generated(NUMBER, kind), namespace.namespace, kind))
    took[f"{NUMBER} {kind} specs tried by server-side dry-run"] = time.monotonic() - start
    kinds: Counter[str] = Counter()
    for verdict in verdicts:
        kinds[check(verdict)] += 1
    assert sum(kinds.values()) == NUMBER
    assert kinds["both take it"] > NUMBER / 10
    assert kinds["both refuse it"] > NUMBER / 10
    assert kinds["both refuse it, for other fields"] < NUMBER / 50, kinds


def check(verdict: Verdict) -> str:
    """Compare API server and models; returns the kind of agreement, and fails on an unexpected difference."""
    said = str(verdict.answer.get("message"))
    assert verdict.status in (201, 400, 422), f"{verdict.status} {said}: {verdict.sent}"
    if verdict.is_taken:
        fields = refused_fields(verdict.answer)
        assert fields <= ONLY_THE_MODELS_REFUSE.keys(), f"only the models refuse {fields}: {verdict.sent}"
        return "only the models refuse it" if fields else "both take it"
    assert "spec" in said, "a refusal names the field"
    fields = refused_fields(verdict.sent)
    if not fields:
        assert ONLY_THE_SERVER_REFUSES.search(said), f"only the API server refuses: {said}"
        return "only the API server refuses it"
    return "both refuse it" if any(_names(said, field) for field in fields) else "both refuse it, for other fields"


def refused_fields(manifest: Manifest) -> set[str]:
    """The fields that the models refuse; empty if they accept the job or service."""
    parse = parse_job if manifest["kind"] == KIND else parse_service
    try:
        parse(Document(manifest))
    except JobError as error:
        return {problem.field for problem in error.problems}
    return set()


def _names(text: str, field: str) -> bool:
    """Whether a text names a field or one of its parent sections, where its rule may be defined."""
    parts = re.sub(r"\[(\d+)\]", r".\1", field).split(".")
    places = [".".join(parts[:length]) for length in range(len(parts), 1, -1)]
    return any(place in re.sub(r"\[(\d+)\]", r".\1", text) for place in places)


async def tried(specs: Sequence[Spec], namespace: str, kind: str = KIND) -> list[Verdict]:
    """Send objects with these specs by dry-run, with the validation of kubectl (unknown fields are errors)."""
    access = login()
    path = f"{access.server}/apis/{API_VERSION}/namespaces/{namespace}/{PLURALS[kind]}"
    query = {"dryRun": "All", "fieldValidation": "Strict"}
    connector = aiohttp.TCPConnector(ssl=access.as_ssl_context(), limit=AT_ONCE)
    async with aiohttp.ClientSession(connector=connector, headers=access.as_http_headers()) as session:

        async def attempt(number: int, spec: Spec) -> Verdict:
            manifest = an_object(f"name-{number}", namespace, kind, spec)
            async with session.post(path, params=query, json=manifest) as answer:
                return Verdict(manifest, answer.status, await answer.json())

        return await asyncio.gather(*(attempt(number, spec) for number, spec in enumerate(specs)))


def an_object(name: str, namespace: str, kind: str, spec: Spec) -> Manifest:
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }


@pytest.mark.long
def test_every_job_that_the_api_server_takes_ends_with_a_condition_that_says_why(
    namespace: Kubectl, took: dict[str, float]
) -> None:
    """Afterwards nothing is left to do: no pass fails, and the operator neither sends requests nor writes."""
    here = namespace.namespace

    async def main() -> None:
        taken = [verdict.sent for verdict in await tried(generated(LIVE * 10), here) if verdict.is_taken]
        jobs = taken[:: len(taken) // LIVE][:LIVE]
        assert len(jobs) == LIVE
        # Refused jobs are retried after this time; the test ends before that.
        async with Kube(login) as kube, whole_operator(here, rejected_retry_seconds=3600.0) as operator:
            for job in jobs:
                assert await kube.create(FINETUNE_JOBS, job)
            start = time.monotonic()
            await until_quiet(operator, kube, here)
            took[f"{LIVE} generated jobs settled"] = time.monotonic() - start
            for job in await listed(kube, here):
                check_settled(job)
            passes = await operator.passes()
            assert passes['result="error"'] == 0, passes

    run(main())


def check_settled(job: Manifest) -> None:
    """A valid job waits for its head; the message of any other job names what to change."""
    conditions = {condition["type"]: condition for condition in job["status"]["conditions"]}
    ready, stalled = conditions["Ready"], conditions["Stalled"]
    told = f"{ready} {stalled}: {job['spec']}"
    assert ready["status"] == "False", told
    if stalled["status"] == "True":
        assert "spec" in stalled["message"] or stalled["reason"] == "Refused", told
        assert conditions["Reconciling"]["status"] == "False", told
    elif job["spec"]["suspend"]:
        assert conditions["Suspended"]["status"] == "True", told
    else:
        assert ready["message"], told
        assert conditions["ClusterReady"]["reason"] == "HeadPending", told


async def listed(kube: Kube, namespace: str) -> list[Manifest]:
    return [job async for jobs, _ in kube.pages(FINETUNE_JOBS, namespace, "") for job in jobs]


async def until_quiet(operator: WholeOperator, kube: Kube, namespace: str) -> None:
    """Wait until every job has a status, and no request and no write has happened for some time."""
    async with asyncio.timeout(SETTLED_SECONDS):
        while True:
            before = await state(operator, kube, namespace)
            await asyncio.sleep(QUIET_SECONDS)
            have_all = all((job.get("status") or {}).get("conditions") for job in await listed(kube, namespace))
            if have_all and await state(operator, kube, namespace) == before:
                return


async def state(operator: WholeOperator, kube: Kube, namespace: str) -> tuple[Counter[str], dict[str, str]]:
    """The number of requests so far, and the resource version of every job."""
    versions = {job["metadata"]["name"]: job["metadata"]["resourceVersion"] for job in await listed(kube, namespace)}
    return await operator.calls(), versions
