"""Files of ModelServices with invalid fields or combinations: one clear line per error, and exit code 20."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotune.crd import MODEL_SERVICES, custom_resource_definition
from spotune.crd.structural_schema import VALIDATIONS
from tests.api.support.job_files import check_broken_job, run_validate
from tests.api.support.service_files import SERVICE_FILE

MODEL = "{finetuneJob: t5-wikisql}"
ADAPTER = "{name: finance, finetuneJob: t5-finance}"
REPLICAS = "  replicas: {min: 1, max: 3}\n"
SECTIONS = (
    "model, adapters, replicas, gpus, engine, batchInvariant, capacity, onDemandBase, resources, priorityClassName, "
    "serviceAccountName, "
    "podTemplate, gateway, apiKeysSecretRef, requestTimeout, rollout, ingress, httpRoute, cluster, suspend"
)
ID = "expected letters and digits, with . _ - : / between them, at most 128 characters"
SOURCE = "expected hf://owner/name or s3://bucket/prefix (for a folder use claim, for a trained job finetuneJob)"
ONE_MODEL = "set exactly one of finetuneJob, source and claim"
ONE_ADAPTER = "set exactly one of finetuneJob and claim"
CLAIM = "expected the name of a PersistentVolumeClaim: a-z, 0-9, - and ."
PATH = "expected a path on the volume, without .., at most 1024 characters"
HOST = "expected a DNS name such as models.example.com, without https:// and without a path"
GATEWAY = "expected the name of a Gateway: a-z, 0-9, - and ."
REDIS = "expected host:port such as redis.team.svc:6379, without redis:// before it"
NAME = "use a-z, 0-9 and -, and start and end with a letter or digit"
LONG = "at most 40 are allowed, because pod names are made from it"
METRIC = "expected the name of a metric such as loss or exactMatch"
DURATION = "expected a duration such as 30s, 5m, 1h30m or 500ms"

# (what is broken, text of the valid file, what is there instead, what is printed after the file's name)
WRONG_FIELDS = [
    ("no spec", SERVICE_FILE[SERVICE_FILE.index("spec:") :], "", ":1: spec: is required"),
    ("no model", f"  model: {MODEL}\n", "", ":4: spec.model: is required"),
    (
        "misspelt field",
        "finetuneJob: t5-wikisql",
        "finetunejob: a",
        ":5: spec.model.finetunejob: is not a field; did you mean finetuneJob?",
    ),
    (
        "unknown field",
        "max: 3",
        "most: 3",
        ":9: spec.replicas.most: is not a field; spec.replicas has min, max, targetOngoingRequests, scaleDownDelay",
    ),
    (
        "field of another section",
        "max: 3",
        "host: a",
        ":9: spec.replicas.host: is not a field here; host is at spec.ingress.host",
    ),
    ("unknown section", REPLICAS, "  volumes: {}\n", f":9: spec.volumes: is not a field; spec has {SECTIONS}"),
    (
        "misspelt field of an adapter",
        "claim: {",
        "clam: {",
        ":8: spec.adapters[1].clam: is not a field; did you mean claim?",
    ),
    (
        "unknown field of an adapter",
        "path: sales/export",
        "path: a, colour: b",
        ":8: spec.adapters[1].claim.colour: is not a field; spec.adapters[1].claim has name, path",
    ),
    ("adapter without a name", "name: finance, ", "", ":7: spec.adapters[0].name: is required"),
    ("claim without a path", ", path: sales/export", "", ":8: spec.adapters[1].claim.path: is required"),
    (
        "unknown part",
        "spec:",
        "colour: red\nspec:",
        ":4: colour: is not a field; a ModelService has apiVersion, kind, metadata, spec, status",
    ),
]
WRONG_VALUES = [
    ("name with capitals", "text-to-sql", "SQL", f":3: metadata.name: 'SQL' is not a valid Kubernetes name: {NAME}"),
    (
        "long name",
        "text-to-sql",
        "a" * 41,
        f":3: metadata.name: {'a' * 41!r} has 41 characters; {LONG}",
    ),
    ("model id with a space", MODEL, "{name: my model, finetuneJob: a}", f':5: spec.model.name: {ID}, not "my model"'),
    ("adapter with an empty name", "finance", '""', f':7: spec.adapters[0].name: {ID}, not ""'),
    (
        "bucket without a prefix as the source",
        MODEL,
        '{source: "s3://bucket"}',
        f':5: spec.model.source: {SOURCE}, not "s3://bucket"',
    ),
    ("folder as the source", MODEL, "{source: models/llama}", f':5: spec.model.source: {SOURCE}, not "models/llama"'),
    (
        "name of a claim",
        "name: adapters",
        "name: Adapters",
        f':8: spec.adapters[1].claim.name: {CLAIM}, not "Adapters"',
    ),
    ("path out of the volume", "sales/export", "../other", f':8: spec.adapters[1].claim.path: {PATH}, not "../other"'),
    (
        "no replicas at most",
        "{min: 1, max: 3}",
        "{min: 0, max: 0}",
        ":9: spec.replicas.max: expected at least 1, not 0",
    ),
    ("negative minimum", "min: 1", "min: -1", ":9: spec.replicas.min: expected at least 0, not -1"),
    (
        "capacity of jobs",
        REPLICAS,
        "  capacity: spot-then-on-demand\n",
        ':9: spec.capacity: expected spot, on-demand or mixed, not "spot-then-on-demand"; did you mean on-demand?',
    ),
    ("timeout without a unit", REPLICAS, "  requestTimeout: 600\n", f":9: spec.requestTimeout: {DURATION}, not 600"),
    ("no time at all", REPLICAS, "  requestTimeout: 0s\n", ":9: spec.requestTimeout: must be longer than 0s"),
    (
        "no steps",
        REPLICAS,
        "  rollout: {steps: []}\n",
        ":9: spec.rollout.steps: expected a list of at least 1, not an empty list",
    ),
    (
        "step above all requests",
        REPLICAS,
        "  rollout: {steps: [10, 101]}\n",
        ":9: spec.rollout.steps[1]: expected at most 100, not 101",
    ),
    (
        "metric with a space",
        REPLICAS,
        "  rollout: {promoteIf: {metric: exact match}}\n",
        f':9: spec.rollout.promoteIf.metric: {METRIC}, not "exact match"',
    ),
    (
        "host with a scheme",
        REPLICAS,
        "  ingress: {host: 'https://a.b'}\n",
        f':9: spec.ingress.host: {HOST}, not "https://a.b"',
    ),
    (
        "HTTPRoute without a Gateway",
        REPLICAS,
        "  httpRoute: {hostnames: [a.b]}\n",
        ":9: spec.httpRoute.parentRefs: is required",
    ),
    (
        "HTTPRoute for all hosts of a domain",
        REPLICAS,
        "  httpRoute: {hostnames: ['*.a.b'], parentRefs: [{name: a}]}\n",
        f':9: spec.httpRoute.hostnames[0]: {HOST}, not "*.a.b"',
    ),
    (
        "Gateway with its namespace in the name",
        REPLICAS,
        "  httpRoute: {hostnames: [a.b], parentRefs: [{name: gateways/a}]}\n",
        f':9: spec.httpRoute.parentRefs[0].name: {GATEWAY}, not "gateways/a"',
    ),
    (
        "listeners of a Gateway beside all its listeners",
        REPLICAS,
        "  httpRoute: {hostnames: [a.b], parentRefs: [{name: a}, {name: b}, {name: a, sectionName: https}]}\n",
        ":9: spec.httpRoute.parentRefs: give each reference to the Gateway a another sectionName",
    ),
    (
        "Redis with a scheme",
        REPLICAS,
        "  cluster: {redisAddress: 'redis://a:1'}\n",
        f':9: spec.cluster.redisAddress: {REDIS}, not "redis://a:1"',
    ),
    (
        "too many adapters",
        f"    - {ADAPTER}\n",
        "".join(f"    - {{name: a{number}, finetuneJob: a}}\n" for number in range(64)),
        ":6: spec.adapters: expected a list of at most 64, not 65",
    ),
]
WRONG_COMBINATIONS = [
    ("model from nowhere", MODEL, "{name: a}", f":5: spec.model: {ONE_MODEL}"),
    ("model from two places", MODEL, "{finetuneJob: a, source: 'hf://a/b'}", f":5: spec.model: {ONE_MODEL}"),
    (
        "model from a job and a claim",
        MODEL,
        "{finetuneJob: a, claim: {name: a, path: b}}",
        f":5: spec.model: {ONE_MODEL}",
    ),
    (
        "revision of a job",
        "t5-wikisql",
        "a, revision: v1",
        ":5: spec.model.revision: is only used with an hf:// source",
    ),
    (
        "token for a job",
        "t5-wikisql",
        "a, tokenSecretRef: {name: a, key: b}",
        ":5: spec.model.tokenSecretRef: is only used with an hf:// source",
    ),
    (
        "revision of a bucket",
        "finetuneJob: t5-wikisql",
        "source: 's3://bucket/a', revision: v1",
        ":5: spec.model.revision: is only used with an hf:// source",
    ),
    (
        "token for a bucket",
        "finetuneJob: t5-wikisql",
        "source: 's3://bucket/a', tokenSecretRef: {name: a, key: b}",
        ":5: spec.model.tokenSecretRef: is only used with an hf:// source",
    ),
    ("adapter from nowhere", ", finetuneJob: t5-finance", "", f":7: spec.adapters[0]: {ONE_ADAPTER}"),
    (
        "adapter from two places",
        "{name: adapters, path: sales/export}",
        "{name: a, path: b}, finetuneJob: c",
        f":8: spec.adapters[1]: {ONE_ADAPTER}",
    ),
    (
        "two adapters of one name",
        "name: sales",
        "name: finance",
        ":6: spec.adapters: the name 'finance' is given more than once: every adapter needs its own",
    ),
    (
        "adapter called like the service",
        "name: sales",
        "name: text-to-sql",
        ":6: spec.adapters: must not contain the model's own id 'text-to-sql': every adapter needs its own name",
    ),
    (
        "adapter called like the model",
        MODEL,
        "{name: sales, finetuneJob: a}",
        ":6: spec.adapters: must not contain the model's own id 'sales': every adapter needs its own name",
    ),
    ("minimum above the maximum", "min: 1", "min: 4", ":9: spec.replicas.min: 4 is more than max, 3"),
    ("minimum above the default maximum", "min: 1, max: 3", "min: 2", ":9: spec.replicas.min: 2 is more than max, 1"),
    (
        "more on-demand replicas than replicas",
        REPLICAS,
        "  capacity: mixed\n  onDemandBase: 2\n",
        ":10: spec.onDemandBase: 2 is more than replicas.max, 1",
    ),
    (
        "vLLM without GPUs",
        REPLICAS,
        "  engine: vllm\n  gpus: 0\n",
        ":9: spec.engine: vllm needs a GPU: set gpus, or leave engine to auto",
    ),
    (
        "batch-invariant kernels on processors",
        REPLICAS,
        "  batchInvariant: true\n  gpus: 0\n",
        ":9: spec.batchInvariant: is only used with vLLM, which runs on GPUs",
    ),
    (
        "batch-invariant kernels of the other engine",
        REPLICAS,
        "  batchInvariant: true\n  engine: transformers\n",
        ":9: spec.batchInvariant: is only used with vLLM, which runs on GPUs",
    ),
    (
        "steps that go back",
        REPLICAS,
        "  rollout: {steps: [50, 10, 100]}\n",
        ":9: spec.rollout.steps: must be ascending, such as [10, 50, 100]",
    ),
    (
        "step twice",
        REPLICAS,
        "  rollout: {steps: [50, 50, 100]}\n",
        ":9: spec.rollout.steps: must be ascending, such as [10, 50, 100]",
    ),
    (
        "rollout that never ends",
        REPLICAS,
        "  rollout: {steps: [10, 50]}\n",
        ":9: spec.rollout.steps: must end with 100: the last step promotes the new version",
    ),
    (
        "metric without a job",
        f"{MODEL}\n",
        "{claim: {name: a, path: b}}\n  rollout: {promoteIf: {metric: loss}}\n",
        ":6: spec.rollout.promoteIf.metric: is only used with model.finetuneJob, which evaluates the model",
    ),
    (
        "password of no Redis",
        REPLICAS,
        "  cluster: {redisPasswordSecretRef: {name: a, key: b}}\n",
        ":9: spec.cluster.redisPasswordSecretRef: is only used with redisAddress",
    ),
]
BROKEN = [*WRONG_FIELDS, *WRONG_VALUES, *WRONG_COMBINATIONS]


@pytest.mark.parametrize(
    ("valid", "broken", "line"), [case[1:] for case in BROKEN], ids=[case[0].replace(" ", "-") for case in BROKEN]
)
def test_a_broken_service_file_gives_one_clear_line_and_exit_code_20(
    valid: str,
    broken: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_broken_job(valid, broken, line, tmp_path, monkeypatch, capsys, SERVICE_FILE)


def test_the_unmodified_service_file_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "service.yaml").write_text(SERVICE_FILE)
    assert run_validate(capsys, str(tmp_path / "service.yaml")) == (0, "")


def checked_fields(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """The fields that a CEL rule or the API server's check of a map by name refuses."""
    for rule in schema.get(VALIDATIONS, ()):
        yield f"{path}{rule.get('fieldPath', '')}".removeprefix(".")
    if schema.get("x-kubernetes-list-type") == "map":
        yield path.removeprefix(".")
    for name, field in schema.get("properties", {}).items():
        yield from checked_fields(field, f"{path}.{name}")
    if "items" in schema:
        yield from checked_fields(schema["items"], f"{path}[]")


@pytest.mark.parametrize(
    "line", [case[3] for case in WRONG_COMBINATIONS], ids=[case[0].replace(" ", "-") for case in WRONG_COMBINATIONS]
)
def test_the_api_server_checks_the_same_combinations(line: str) -> None:
    """tests/cluster/test_service_crd.py sends the files to an API server."""
    schema = custom_resource_definition(MODEL_SERVICES)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    field = line.split(":")[2].strip().replace("[0]", "[]").replace("[1]", "[]")
    assert field in set(checked_fields(schema))
