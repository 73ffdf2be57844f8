"""The merge of pod templates: the override wins, nothing else is lost, and it is idempotent."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotune_operator.children.pod_template.strategic_merge import merge
from spotune_operator.errors import PodTemplateError
from tests.operator.support.resolved_jobs import holds

names = st.sampled_from(["a", "b", "c"])
values = st.sampled_from(["1", "2"])
variables = st.fixed_dictionaries(
    {"name": names}, optional={"value": values, "valueFrom": st.fixed_dictionaries({"fieldRef": names})}
)
tolerations = st.fixed_dictionaries(
    {"operator": st.just("Exists")},
    optional={"key": names, "value": values, "effect": st.sampled_from(["NoSchedule", "NoExecute"])},
)
volumes = st.fixed_dictionaries({"name": names}, optional={"emptyDir": st.just({}), "hostPath": st.just({"path": "/"})})
expressions = st.fixed_dictionaries({"key": names, "operator": st.just("In"), "values": st.lists(values, min_size=1)})
terms = st.fixed_dictionaries({"matchExpressions": st.lists(expressions, max_size=2)})
containers = st.fixed_dictionaries(
    {"name": names},
    optional={
        "image": names,
        "env": st.lists(variables, max_size=3),
        "envFrom": st.lists(st.fixed_dictionaries({"secretRef": st.fixed_dictionaries({"name": names})}), max_size=2),
        "volumeMounts": st.lists(st.fixed_dictionaries({"mountPath": names, "name": names}), max_size=2),
        "ports": st.lists(st.fixed_dictionaries({"containerPort": st.sampled_from([80, 81])}), max_size=2),
        "command": st.lists(names, max_size=2),
        "livenessProbe": st.sampled_from([{"exec": {"command": ["true"]}}, {"httpGet": {"port": 80}}]),
    },
)


def pod(node_selector_terms: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    required = st.fixed_dictionaries({"nodeSelectorTerms": node_selector_terms})
    optional: dict[Any, st.SearchStrategy[Any]] = {
        "containers": st.lists(containers, max_size=3, unique_by=lambda item: item["name"]),
        "tolerations": st.lists(tolerations, max_size=3),
        "volumes": st.lists(volumes, max_size=3, unique_by=lambda item: item["name"]),
        "nodeSelector": st.dictionaries(names, values),
        "affinity": st.fixed_dictionaries({"nodeAffinity": required}),
        "restartPolicy": values,
    }
    return st.fixed_dictionaries({"spec": st.fixed_dictionaries({}, optional=optional)})


templates = pod(st.lists(terms, max_size=3))
upper_templates = pod(st.lists(terms, min_size=1, max_size=2))


def last_of_each(items: list[dict[str, Any]], *key: str) -> list[dict[str, Any]]:
    """The items that count: of several with one key, the last."""
    return list({tuple(item.get(part) for part in key): item for item in items}.values())


def counted(template: dict[str, Any]) -> dict[str, Any]:
    """The template without items that a later item of the same list overrides."""
    keys = {"env": ("name",), "volumeMounts": ("mountPath",), "tolerations": ("key", "value", "effect")}

    def reduced(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {field: reduced(field, inner) for field, inner in value.items()}
        if isinstance(value, list):
            items = last_of_each(value, *keys[name]) if name in keys else value
            return [reduced("", item) for item in items]
        return value

    return {field: reduced(field, value) for field, value in template.items()}


@given(templates, upper_templates)
def test_result_contains_the_whole_override(below: dict[str, Any], above: dict[str, Any]) -> None:
    assert holds(merge(below, above, "t"), counted(above))


@given(templates, templates)
def test_merging_again_changes_nothing(below: dict[str, Any], above: dict[str, Any]) -> None:
    once = merge(below, above, "t")
    assert merge(once, above, "t") == once


@given(templates)
def test_override_of_nothing_is_itself(template: dict[str, Any]) -> None:
    assert merge({}, template, "t") == merge(template, {}, "t")


@given(templates, templates)
def test_variables_of_the_base_stay(below: dict[str, Any], above: dict[str, Any]) -> None:
    def variables_of(template: dict[str, Any]) -> dict[tuple[str, str], Any]:
        return {
            (container["name"], variable["name"]): variable
            for container in template["spec"].get("containers", [])
            for variable in container.get("env", [])
        }

    merged, upper = variables_of(merge(below, above, "t")), variables_of(above)
    expected = {key: variable for key, variable in variables_of(below).items() if key not in upper}
    assert {key: merged[key] for key in expected} == expected


@given(templates, templates)
def test_no_list_has_two_items_with_one_key(below: dict[str, Any], above: dict[str, Any]) -> None:
    spec = merge(below, above, "t")["spec"]
    for container in spec.get("containers", []):
        for name, key in (("env", "name"), ("volumeMounts", "mountPath"), ("ports", "containerPort")):
            found = [item[key] for item in container.get(name, [])]
            assert len(found) == len(set(found))


@given(templates, templates)
def test_merge_changes_neither_template_and_shares_nothing(below: dict[str, Any], above: dict[str, Any]) -> None:
    before = repr((below, above))
    _spoil(merge(below, above, "t"))
    assert repr((below, above)) == before


def _spoil(value: Any) -> None:
    for item in list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []:
        _spoil(item)
    if isinstance(value, dict | list):
        value.clear()


def test_order_of_containers_is_that_of_the_base() -> None:
    below = {"containers": [{"name": "ray"}, {"name": "supervisor"}]}
    above = {"containers": [{"name": "sidecar"}, {"name": "supervisor", "image": "s"}, {"name": "ray", "image": "r"}]}
    assert [item["name"] for item in merge(below, above, "t")["containers"]] == ["ray", "supervisor", "sidecar"]


def test_variable_is_replaced_as_a_whole() -> None:
    below = {"env": [{"name": "TOKEN", "value": "mine"}]}
    above = {"env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}
    assert merge(below, above, "t") == above


def test_probe_is_replaced_as_a_whole() -> None:
    below = {"livenessProbe": {"exec": {"command": ["true"]}, "periodSeconds": 1}}
    above = {"livenessProbe": {"httpGet": {"port": 80}}}
    assert merge(below, above, "t") == above


def test_null_removes_a_default() -> None:
    assert merge({"affinity": {"podAntiAffinity": {}}}, {"affinity": None}, "t") == {}


def test_both_required_node_affinities_must_match() -> None:
    gpu, zone = {"key": "gpu", "operator": "Exists"}, {"key": "zone", "operator": "In", "values": ["1"]}
    eks, karpenter = {"key": "eks", "operator": "Exists"}, {"key": "karpenter", "operator": "Exists"}
    below = {"nodeSelectorTerms": [{"matchExpressions": [gpu]}, {"matchExpressions": [zone]}]}
    above = {"nodeSelectorTerms": [{"matchExpressions": [eks]}, {"matchExpressions": [karpenter]}]}
    merged = merge(below, above, "t")["nodeSelectorTerms"]
    assert [term["matchExpressions"] for term in merged] == [
        [gpu, eks],
        [gpu, karpenter],
        [zone, eks],
        [zone, karpenter],
    ]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"spec": []}, "t.spec: is a list in one template and a mapping in another"),
        ({"spec": {"containers": {"name": "ray"}}}, "t.spec.containers: is a mapping in one template"),
        ({"spec": {"containers": ["ray"]}}, "t.spec.containers: must be a list of mappings with name"),
        ({"spec": {"containers": [{"image": "x"}]}}, "t.spec.containers: has an item without a name"),
        ({"spec": {"$patch": "replace"}}, "t.spec.$patch: is a patch directive"),
        ({"spec": {"containers": [{"name": "ray", "env": {"A": "1"}}]}}, "t.spec.containers[ray].env: is a mapping"),
    ],
)
def test_unmergeable_template_is_refused_with_its_path(template: dict[str, Any], message: str) -> None:
    ours = {"spec": {"containers": [{"name": "ray", "env": [{"name": "A", "value": "2"}]}]}}
    with pytest.raises(PodTemplateError):
        merge(ours, template, "t")
    with pytest.raises(PodTemplateError) as refused:
        merge(template, ours, "t")
    assert str(refused.value).startswith(message)
