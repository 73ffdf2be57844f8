"""CEL rules that are made from other rules, from models and from lists of fields."""

import re
from collections import Counter

import pytest
from pydantic import BaseModel

from spotune.crd.cel_rules import (
    Rule,
    frozen_fields,
    has_defaults,
    merge,
    merged,
    single_rules,
    unchanged,
)
from spotune.crd.job_rules import JOB_RULES
from spotune.crd.structural_schema import VALIDATIONS
from spotune.crd.user_code_rules import OPTIONAL_SECTIONS
from spotune.job import CheckpointSpec, DatasetSpec, FinetuneJobSpec, TrainingSpec
from tests.api.crd.test_definition import JOB, at

OBJECTIVE = "self.training.objective"


def test_rules_of_absent_sections_hold() -> None:
    rule = Rule("self.model.task == 'seq2seq' || self.dataset.text == ''", "message")
    [guarded] = merged([rule], OPTIONAL_SECTIONS, (), "spec")
    assert guarded.expression == f"!has(self.model) || !has(self.dataset) || ({rule.expression})"
    [other] = merged([Rule("self.training.seed == 1", "message")], OPTIONAL_SECTIONS, (), "spec")
    assert other.expression == "self.training.seed == 1"


def test_defaults_in_cel_leave_out_what_a_rule_cannot_read() -> None:
    assert has_defaults("self.checkpoint", CheckpointSpec, ("keep", "keepEverySteps")) == (
        "[self.checkpoint].all(checkpoint, checkpoint.every == 'auto' && checkpoint.memoryCopies == 'auto' && "
        "checkpoint.peerCopyRate == 200)"
    )


def test_reserved_words_are_escaped_in_the_rules_of_the_api_server() -> None:
    rule = Rule("self.training.function == '' || self.functions.matches('^package:function$')", "message")
    assert rule.as_json()["rule"] == (
        "self.training.__function__ == '' || self.functions.matches('^package:function$')"
    )


def test_reserved_words_stay_as_they_are_in_a_text() -> None:
    rule = Rule("self.a.in == ''", "", message_expression=r"self.a.in == '' ? 'it\'s a.in' : 'remove a.function'")
    assert rule.as_json() == {
        "rule": "self.a.__in__ == ''",
        "message": "",
        "messageExpression": r"self.a.__in__ == '' ? 'it\'s a.in' : 'remove a.function'",
    }


def test_rules_become_one_whose_message_names_the_fields_that_are_broken() -> None:
    rules = [Rule("self.a > 0", "is too small", "b.a"), Rule("self.c", "is required", "b.c"), Rule("self.d", "isn't d")]
    assert list(merged(rules, (), (), "spec")) == [
        Rule(
            "(self.a > 0) && (self.c) && (self.d)",
            "fields contradict one another: spotune validate names them",
            message_expression=(
                "(((self.a > 0) ? '' : 'spec.b.a: is too small. ') + ((self.c) ? '' : 'spec.b.c: is required. ') + "
                r"((self.d) ? '' : 'spec: isn\'t d. ')).trim()"
            ),
            combines=tuple(rules),
        )
    ]
    assert [rule.field for rule in merged(rules[:2], (), (), "spec")] == ["b"]


def test_a_rule_alone_keeps_its_field_and_message() -> None:
    rule = Rule("self.a > 0", "is too small", "a")
    assert list(merged([rule], (), (), "spec")) == [rule]


def test_a_precise_message_is_kept_in_a_merged_rule() -> None:
    rules = [Rule("self.a", "is wrong", "a", message_expression="'has ' + self.b"), Rule("self.c", "is required", "c")]
    [rule] = merged(rules, (), (), "")
    assert rule.message_expression == (
        "(((self.a) ? '' : 'a: ' + 'has ' + self.b + '. ') + ((self.c) ? '' : 'c: is required. ')).trim()"
    )


def test_what_merged_rules_share_is_looked_up_once() -> None:
    rules = [Rule(f"{OBJECTIVE} != '{name}' || self.a", f"for {name}", "a") for name in ("sft", "dpo")]
    [rule] = merged(rules, (), (OBJECTIVE, "self.other"), "spec")
    assert rule.expression == (
        f"[{OBJECTIVE}].all(objective, (objective != 'sft' || self.a) && (objective != 'dpo' || self.a))"
    )


def test_a_place_whose_cost_could_not_be_estimated_through_a_variable_is_looked_up_again() -> None:
    expressions = (
        "self.a.b == ''",
        "has(self.a.c)",
        "has(self.a)",
        "self.a.b.matches('x')",
        "self.a.list.size() > 1",
        "self.b in self.a.list",
        "self.a.b in self.c",
        "self.b == self.a.b",
        "self.a.b == self.b",
        "self.ab == ''",
    )
    [rule] = merged([Rule(each, "message") for each in expressions], (), ("self.a",), "spec")
    alone = " && ".join(f"({each})" for each in expressions[2:])
    assert rule.expression == f"[self.a].all(a, (a.b == '') && (has(a.c)) && {alone})"


def test_rules_of_different_optional_sections_or_reasons_stay_apart() -> None:
    """One rule for both would hold, without any check, for an object that has just one of the sections."""
    rules = [
        Rule("self.model.a", "message"),
        Rule("self.dataset.b", "message"),
        Rule("self.c", "message"),
        Rule("self.d", "message", reason="FieldValueForbidden"),
        Rule("self.model.e", "message"),
    ]
    assert [rule.expression for rule in merged(rules, OPTIONAL_SECTIONS, (), "spec")] == [
        "!has(self.model) || ((self.model.a) && (self.model.e))",
        "!has(self.dataset) || (self.dataset.b)",
        "self.c",
        "self.d",
    ]


def test_a_field_that_may_be_absent_is_unchanged_if_it_stays_absent() -> None:
    assert unchanged("spec.a", optional=False) == "self.spec.a == oldSelf.spec.a"
    assert unchanged("spec.a", optional=True) == (
        "has(self.spec.a) == has(oldSelf.spec.a) && (!has(self.spec.a) || self.spec.a == oldSelf.spec.a)"
    )


def test_frozen_fields_are_compared_if_the_section_changed_and_named_in_the_message() -> None:
    rule = frozen_fields("spec.a", {"b": False, "c": True}, "must not change", optional=False)
    b, c = unchanged("spec.a.b", optional=False), unchanged("spec.a.c", optional=True)
    assert rule == Rule(
        f"self.spec.a == oldSelf.spec.a || (({b}) && ({c}))",
        "must not change",
        "spec.a",
        "FieldValueForbidden",
        f"((({b}) ? '' : ' b') + (({c}) ? '' : ' c')).trim().replace(' ', ', ') + ' must not change'",
        (
            Rule(b, "must not change", "spec.a.b", "FieldValueForbidden"),
            Rule(c, "must not change", "spec.a.c", "FieldValueForbidden"),
        ),
    )


def test_an_optional_section_with_frozen_fields_must_not_come_or_go() -> None:
    rule = frozen_fields("spec.a", {"b": False}, "must not change", optional=True)
    same = unchanged("spec.a.b", optional=False)
    assert rule.expression == (
        f"has(self.spec.a) == has(oldSelf.spec.a) && (!has(self.spec.a) || self.spec.a == oldSelf.spec.a || (({same})))"
    )
    assert rule.message_expression.startswith("(has(self.spec.a) && has(oldSelf.spec.a) ? (((")
    assert rule.message_expression.endswith(" : 'must not change')")


@pytest.mark.parametrize(
    ("section", "place"), [(FinetuneJobSpec, ".spec"), (TrainingSpec, ".spec.training"), (DatasetSpec, ".spec.dataset")]
)
def test_rules_of_wide_sections_are_merged_as_far_as_they_can_be(section: type[BaseModel], place: str) -> None:
    def key(rule: Rule) -> tuple[str, str]:
        guards = re.match(r"(!has\([\w.]+\) \|\| )*", rule.expression)
        return rule.reason, guards[0] if guards else ""

    rules = JOB_RULES[section]
    assert [key for key, count in Counter(map(key, rules)).items() if count > 1] == []
    assert [rule.as_json() for rule in rules] == at(place, JOB)[VALIDATIONS]


def test_a_merged_rule_has_the_guard_of_every_optional_section_that_its_rules_read() -> None:
    for rule in JOB_RULES[FinetuneJobSpec]:
        singles = rule.combines or (rule,)
        guards = [
            f"!has({each}) || " for each in OPTIONAL_SECTIONS if any(f"{each}." in one.expression for one in singles)
        ]
        assert rule.expression.startswith(("".join(guards) + "(") if guards else "")


def test_the_documentation_still_has_every_rule_that_was_combined() -> None:
    rules = [Rule("self.a > 0", "is too small", "a"), Rule("self.b", "is required", "b")]
    assert list(single_rules(merged(rules, (), (), "spec"))) == rules
    frozen = frozen_fields("spec.a", {"b": False, "c": True}, "must not change", optional=False)
    assert [rule.field for rule in single_rules([frozen])] == ["spec.a.b", "spec.a.c"]
    assert [rule.field for rule in single_rules([merge([frozen, *rules], (), "")])] == [
        "spec.a.b",
        "spec.a.c",
        "a",
        "b",
    ]
