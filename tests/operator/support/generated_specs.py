"""Specs of FinetuneJobs and ModelServices generated from the CRDs: some valid, most with one or two invalid fields."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from spotune.crd import CUSTOM_RESOURCES, custom_resource_definition
from spotune.job import KIND
from spotune.service import SERVICE_KIND
from spotune.units.quantities import Quantity

Schema = Mapping[str, Any]
Spec = dict[str, Any]

_JOBS: tuple[Spec, ...] = (
    {
        "model": {"source": "hf://google-t5/t5-small", "task": "seq2seq"},
        "dataset": {"prepare": {"source": "data/rows.jsonl"}, "prompt": "{q}", "completion": "{a}"},
        "training": {"epochs": 1},
    },
    {
        "model": {"source": "model", "task": "seq2seq"},
        "dataset": {"train": {"source": "shards"}, "eval": {"fraction": 0.1}},
        "training": {"maxSteps": 10, "evaluation": {"generate": True, "metrics": ["loss", "exactMatch"]}},
        "workers": {"count": 2, "gpus": 0},
        "storage": {"storageClassName": "shared", "size": "1Gi"},
    },
    {
        "model": {"source": "s3://bucket/model"},
        "dataset": {"prepare": {"source": "s3://bucket/*.csv"}, "text": "{body}", "packing": True},
        "training": {"epochs": 2, "globalBatchSize": 8},
        "workers": {"count": 3, "min": 2, "capacity": "spot-then-on-demand", "onDemandAfter": "1m"},
        "cluster": {"provider": "aks"},
    },
    {
        "model": {"source": "/data/model"},
        "dataset": {"train": {"source": "gs://bucket/chats"}, "messages": "chat"},
        "training": {"maxSteps": 5, "warmupSteps": 2},
        "cluster": {"provider": "none", "image": "mine:1", "queueName": "queue"},
        "storage": {"existingClaim": "models"},
    },
)
_SERVICES: tuple[Spec, ...] = (
    {"model": {"finetuneJob": "sql"}, "replicas": {"min": 0, "max": 8}},
    {
        "model": {"source": "hf://owner/name", "revision": "v1", "tokenSecretRef": {"name": "hf", "key": "token"}},
        "adapters": [{"name": "sql", "finetuneJob": "sql"}, {"name": "a/b", "claim": {"name": "c", "path": "d/e"}}],
        "replicas": {"min": 2, "max": 8},
        "capacity": "mixed",
        "engine": "vllm",
        "batchInvariant": True,
    },
    {
        "model": {"name": "team/llama", "claim": {"name": "models", "path": "llama"}},
        "gateway": {"replicas": 2},
        "ingress": {"host": "models.example.com"},
        "httpRoute": {"hostnames": ["models.example.com"], "parentRefs": [{"name": "public", "namespace": "gateways"}]},
        "cluster": {"redisAddress": "redis:6379", "redisPasswordSecretRef": {"name": "redis", "key": "password"}},
    },
)
_BASES: Mapping[str, tuple[Spec, ...]] = {KIND: _JOBS, SERVICE_KIND: _SERVICES}
KINDS = tuple(_BASES)
"""Kinds that specs are generated of. Those of sweeps have none: rules cannot read the values of a parameter."""
"""Valid specs by kind, one for each sort of job and service."""


@dataclass(frozen=True)
class Pool:
    """Values for a field: mostly valid ones, and mostly invalid or extreme ones."""

    right: list[Any]
    wrong: list[Any]

    def values(self) -> st.SearchStrategy[Any]:
        """A value that is valid in nine of ten cases."""
        return st.integers(0, 9).flatmap(lambda number: st.sampled_from(self.right if number else self.wrong))


_NAMES = Pool(
    ["shared", "hf", "a-b.c", "registry/x:1", "main", "7", "null"],
    ["", "UPPER_case", "ümläut", "😀", "a" * 300, "-lead", "x\ny", "$(HOME)", "{{x}}"],
)
_SOURCES = Pool(
    [
        "hf://a/b",
        "s3://bucket/x",
        "gs://b",
        "az://c/d",
        "shards/train",
        "/abs",
        "../up",
        "s3://b/*.csv",
        "a b",
        "hf:/a",
    ],
    ["", "://", "s3://", "s3:///", "ftp://host/x", "S3://b/x", "x" * 5000, "s3://ü/😀", "a\nb", "hf:// x", "~/mine"],
)
_DURATIONS = Pool(
    ["30s", "5m", "1h30m", "500ms", "1d", "1.5h", "10m0s", "2h"],
    [
        *("0s", "0ms", "9" * 60 + "d", "9" * 400 + "d", "", "30", "-5s", "5 m", "m", "1h-5m", "1e3s", "∞", "5M", "1.s"),
        *(".5s", "1s\n", "\u0663s"),
    ],
)
_QUANTITIES = Pool(
    ["1", "500m", "64Gi", "1.5Ti", ".5", "1e3", "1E3", "1k", 2, 8, "2G"],
    [
        *("0", "1Ei", "100n", "5.", "0.000001", "1e400", "1e-400", "9" * 400, "1e19", "", "-1", "+1", "1 Gi", "1GB"),
        *("many", "1e", "Gi", "\u0661", "1K", "nan", "inf", "1\n", 0, 10**18, 2**63, -1, 0.5),
    ],
)
_TEMPLATES = Pool(
    ["{q}", "{question}: {input}", "{{literal}} {q}", "{ü}", "{q}\n", "{a}{b}" * 500],
    [
        *("", "no column", "{", "}", "{}", "{{q}}", "{q", "{{{q}}}", "{q\n}", "{q.__class__}", "\x00{q}"),
        "x" * 100_000 + "{q}",
    ],
)
_FORMS = {
    "letters and digits": Pool(
        ["sql", "team/llama:8b", "a_b-c.d"], ["", "a b", "-a", "a/", "a" * 128, "a" * 129, "ä", "a\n"]
    ),
    "hf://owner/name": Pool(
        ["hf://owner/name", "hf://gpt2", "s3://bucket/team/llama"],
        ["", "hf://", "hf:///a", "hf://a/b/c", "s3://a/b", "s3://bucket/", "a", "hf://a/b\n", "hf://a b"],
    ),
    "on the volume": Pool(
        ["a", "a/b", "/a/", ""],
        ["..", "a/../b", "a/..", "..a", "a/..b", "...", "x" * 1024, "x" * 1025, "..\n", "ü\n/😀"],
    ),
    "PersistentVolumeClaim": Pool(["models", "a-b.c"], ["", "A", "a_b", "a" * 253, "a" * 254, "a..b", "a\n", "-a"]),
    "DNS name": Pool(["models.example.com", "a"], ["", "https://a.b", "a.b/c", "a:80", "*.a", "A", "a" * 254, "a\n"]),
    "name of a Gateway": Pool(["public", "a.b"], ["", "a/b", "A", "a" * 254, "a\n"]),
    "name of a namespace": Pool(["", "gateways"], ["a.b", "A", "a" * 64, "a\n"]),
    "name of a listener": Pool(["", "https", "a.b"], ["a/b", "A", "a" * 254, "a\n"]),
    "host:port": Pool(
        ["", "redis:6379"], ["redis", "redis://a:1", "a:123456", ":1", "a:", "[::1]:1", "a:1\n", "\u0661:1"]
    ),
}
"""Values of a field by a part of the message of its rule."""
_RESOURCES = Pool(["cpu", "memory", "ephemeral-storage"], ["nvidia.com/gpu", "", "ü", "a/b/c"])
_NUMBERS: list[Any] = [
    *(0, -1, 0.1, 0.9999999, 1.0, -0.5, 1e-12, 1e308, 2**31 - 1, 2**31, 2**32, 2**53, 2**63),
]
_ODD: list[Any] = [
    *(None, True, False, 0, -1, 3, 2**70, 1.5, 1e300, "", "x", "auto", "true", "1", "\u0000", "\ud7ff", "\U0001d518"),
    *("a" * 10_000, [], [None], [[]], ["x"], [1, "x"], {}, {"x": 1}, {"": ""}, {"source": "x"}, {"a": {"b": [{}]}}),
]
"""Values that are invalid for nearly every field."""


# What a field may hold


def _pool(schema: Schema) -> Pool:
    """The values for a field that is neither a section nor free-form."""
    messages = " ".join(rule["message"] for rule in schema.get("x-kubernetes-validations", ()))
    if "enum" in schema:
        return Pool(schema["enum"], [str(schema["enum"][-1]).upper(), *schema["enum"]])
    if schema.get("pattern") == Quantity.PATTERN:
        return _QUANTITIES
    for part, pool in _FORMS.items():
        if part in messages:
            return pool
    if "expected a path or" in messages:
        return _SOURCES
    if "brace" in messages:
        return _TEMPLATES
    if "a duration" in messages and schema.get("type") != "string":
        return Pool([*_DURATIONS.right, "auto", 1, 200], [*_DURATIONS.wrong, 0, -1])
    if "a duration" in messages:
        return _DURATIONS
    if schema.get("x-kubernetes-int-or-string"):
        return Pool(["auto", 1, 2, 8], [0, -1, 64, "4", "Auto"])
    return _pool_of_type(schema)


def _pool_of_type(schema: Schema) -> Pool:
    least = schema.get("minimum", 0)
    match schema.get("type"):
        case "boolean":
            return Pool([True, False], ["true", 1])
        case "integer":
            return Pool([least, 1, 2, 3, 7], [*_NUMBERS, least - 1])
        case "number":
            return Pool([0.1, 0.5, 0.25], [*_NUMBERS, least, schema.get("maximum", 1)])
        case "array" if "properties" in schema["items"]:
            return Pool([[]], [[{}], [""], [{"name": "a"}], [{"name": "a", "finetuneJob": "b"}] * 2])
        case "array":
            return Pool([[_pool(schema["items"]).right[0]]], [[], [""], ["x"] * 500, ["x", "x"]])
        case None:  # a list or a word
            return Pool(["all-linear", ["q", "v"]], ["all", 5, [], [1]])
    return _NAMES


def of_schema(schema: Schema) -> st.SearchStrategy[Any]:
    """Values for a field by its schema, most of them valid."""
    if "properties" in schema:
        return _of_section(schema)
    if "additionalProperties" in schema:
        return st.dictionaries(_RESOURCES.values(), of_schema(schema["additionalProperties"]), max_size=3)
    if schema.get("type") == "object":
        return pod_templates()
    if schema.get("type") == "array":
        return st.lists(of_schema(schema["items"]), max_size=3) | _pool(schema).values()
    return _pool(schema).values()


def _of_section(schema: Schema) -> st.SearchStrategy[Any]:
    """An object with all required fields and some optional ones."""
    fields = schema["properties"]
    required = {name: of_schema(fields[name]) for name in schema.get("required", ())}
    optional = {name: of_schema(field) for name, field in fields.items() if name not in required}
    return st.fixed_dictionaries(required, optional=optional)


@cache
def pod_templates() -> st.SearchStrategy[Any]:
    """Pod templates: realistic, invalid and nonsensical ones."""
    names = st.sampled_from(["ray-worker", "ray-head", "supervisor", "sidecar", "Side_Car", "", "data", "cache", "shm"])
    texts = st.sampled_from(["x", "", "true", "ü", "/data", "/dev/shm", "registry/x:1", "a" * 300, "$(A)"])
    amounts = st.dictionaries(
        st.sampled_from(["cpu", "memory", "nvidia.com/gpu", "hugepages-2Mi"]), _QUANTITIES.values(), max_size=3
    )

    def mapping(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.fixed_dictionaries({}, optional=fields)

    def some(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.lists(items, max_size=2)

    resources = mapping(requests=amounts, limits=amounts)
    variables = mapping(name=st.sampled_from(["A", "PATH", "RAY_ADDRESS", "", "1"]), value=texts | st.just(5))
    mounts = mapping(name=names, mountPath=texts, readOnly=st.booleans())
    ports = mapping(name=names, containerPort=st.sampled_from([80, 8090, 0, 70000, "http"]))
    container = mapping(
        name=names, image=texts, env=some(variables), volumeMounts=some(mounts), ports=some(ports), resources=resources,
        command=some(texts), imagePullPolicy=st.sampled_from(["Always", "Sometimes"]),
    )  # fmt: skip
    tolerations = mapping(
        key=texts, operator=st.sampled_from(["Exists", "Equal", "Like"]), effect=st.sampled_from(["NoSchedule", "No"])
    )
    volumes = mapping(name=names, emptyDir=st.just({}), hostPath=mapping(path=texts))
    requirement = mapping(key=texts, operator=st.sampled_from(["In", "Exists"]), values=some(texts))
    terms = mapping(nodeSelectorTerms=some(mapping(matchExpressions=some(requirement))))
    affinity = mapping(nodeAffinity=mapping(requiredDuringSchedulingIgnoredDuringExecution=terms))
    spec = mapping(
        containers=some(container), initContainers=some(container), volumes=some(volumes), affinity=affinity,
        tolerations=some(tolerations), nodeSelector=st.dictionaries(texts, texts | st.just(1), max_size=2),
        serviceAccountName=names, hostNetwork=st.booleans(), securityContext=mapping(runAsUser=st.integers(-1, 3)),
        terminationGracePeriodSeconds=st.sampled_from([0, -1, 30]), unknownField=texts, restartPolicy=texts,
    )  # fmt: skip
    labels = st.dictionaries(st.sampled_from(["team", "spotune.dev/job", "ray.io/group", "ü", ""]), texts, max_size=2)
    template = mapping(metadata=mapping(labels=labels, annotations=labels, name=names), spec=spec)
    return template | _with_one_odd_part(template)


def _with_one_odd_part(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    @st.composite
    def spoilt(draw: st.DrawFn) -> Any:
        value = copy.deepcopy(draw(values))
        places = list(_places(value))
        if not places:
            return draw(st.sampled_from(_ODD))
        put = draw(st.sampled_from(places))
        put(draw(st.sampled_from(_ODD)))
        return value

    return spoilt()


def _places(value: Any) -> Iterator[Callable[[Any], None]]:
    """Setters of every part of a value."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield _setter(value, name)
        yield from _places(inner)


def _setter(holder: Any, name: Any) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        holder[name] = value

    return put


# Whole specs


@dataclass(frozen=True)
class Field:
    """A field of a spec: its path and its schema."""

    path: tuple[str, ...]
    schema: Schema


@cache
def fields(kind: str) -> tuple[Field, ...]:
    """Every field of the spec of a kind, sections included."""
    (resource,) = (resource for resource in CUSTOM_RESOURCES if resource.kind == kind)
    (version,) = custom_resource_definition(resource)["spec"]["versions"]
    return tuple(_fields_below(version["schema"]["openAPIV3Schema"]["properties"]["spec"], ()))


def _fields_below(schema: Schema, path: tuple[str, ...]) -> Iterator[Field]:
    for name, inner in schema.get("properties", {}).items():
        yield Field((*path, name), inner)
        yield from _fields_below(inner, (*path, name))


def _put(spec: Spec, path: tuple[str, ...], value: Any) -> None:
    """Set a field and create its sections, unless another value is in the place of a section."""
    section: Any = spec
    for name in path[:-1]:
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            return
    section[path[-1]] = value


@st.composite
def _steps(draw: st.DrawFn, kind: str) -> tuple[tuple[str, ...], Any]:
    """A field with a value for it, which is mostly valid."""
    field = draw(st.sampled_from(fields(kind)))
    match draw(st.integers(0, 29)):
        case 0:
            return field.path, draw(st.sampled_from(_ODD))
        case 1:
            return (*field.path[:-1], draw(st.sampled_from([field.path[-1].upper(), "unknown", "ü", ""]))), 1
        case 2 if "default" in field.schema:
            return field.path, field.schema["default"]
    return field.path, draw(of_schema(field.schema))


@st.composite
def specs(draw: st.DrawFn, kind: str = KIND) -> Spec:
    """Specs: a valid one with up to five fields set, and rarely one removed."""
    spec = copy.deepcopy(draw(st.sampled_from(_BASES[kind])))
    for path, value in draw(st.lists(_steps(kind), max_size=5)):
        _put(spec, path, copy.deepcopy(value))
    if draw(st.integers(0, 15)) == 0:
        spec.pop(draw(st.sampled_from(sorted(spec))))
    return spec


def singles(kind: str = KIND) -> Iterator[Spec]:
    """Otherwise valid specs, each with one field set to one of its values, for all fields and values."""
    for field in fields(kind):
        for value in _alone(field.schema):
            spec = copy.deepcopy(_BASES[kind][len(field.path) % 2])
            _put(spec, field.path, copy.deepcopy(value))
            yield spec


def _alone(schema: Schema) -> list[Any]:
    if "additionalProperties" in schema:
        amounts = _pool(schema["additionalProperties"])
        return [{name: amount} for name in ("cpu", "memory") for amount in (*amounts.right, *amounts.wrong)]
    if "properties" in schema or schema.get("x-kubernetes-preserve-unknown-fields"):
        return _ODD
    pool = _pool(schema)
    return [*pool.right, *pool.wrong, *_ODD]


def generated(number: int, kind: str = KIND) -> list[Spec]:
    """A number of specs, always the same: the valid ones; half of the others have one field set."""
    one = list(singles(kind))
    every = max(1, 2 * len(one) // number)
    found: list[Spec] = [copy.deepcopy(base) for base in _BASES[kind]] + one[::every]

    @settings(
        max_examples=max(1, number - len(found)), database=None, derandomize=True, deadline=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(specs(kind))
    def collect(spec: Spec) -> None:
        found.append(spec)

    collect()
    return found[:number]
