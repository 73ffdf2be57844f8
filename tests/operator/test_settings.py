"""The operator's settings from its environment, and what is said of wrong ones."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest

from spotune.errors import UsageError
from spotune_operator.gpu_healing.policy import GpuHealing
from spotune_operator.settings import PREFIX, Settings


def test_nothing_has_to_be_set() -> None:
    assert Settings.from_environment({"PATH": "/bin", "KUBECONFIG": "x"}) == Settings()


def test_every_setting_is_a_variable_and_documented() -> None:
    changed: dict[type, Any] = {str: "other", int: 77, float: 7.5, bool: True}
    for item in fields(Settings):
        if item.name == "healing":
            continue
        value: Any = changed[type(item.default)]
        found = Settings.from_environment({f"{PREFIX}{item.name.upper()}": str(value)})
        assert getattr(found, item.name) == value
        assert found == replace(Settings(), **{item.name: value})
        assert re.search(rf"^ +{item.name}: [A-Z]", Settings.__doc__ or "", re.MULTILINE), item.name


@pytest.mark.parametrize(
    ("text", "namespaces"), [("", ("",)), ("a", ("a",)), ("a,b", ("a", "b")), (" b , a,,b", ("b", "a")), (" , ", ("",))]
)
def test_namespaces_are_named_with_commas_between_them(text: str, namespaces: tuple[str, ...]) -> None:
    assert Settings.from_environment({f"{PREFIX}WATCH_NAMESPACES": text}).namespaces == namespaces


def test_steps_of_healing_are_variables_of_their_own() -> None:
    found = Settings.from_environment(
        {
            "SPOTUNE_OPERATOR_HEAL_CORDON": "true",
            "SPOTUNE_OPERATOR_HEAL_DRAIN": "True",
            "SPOTUNE_OPERATOR_HEAL_DELETE_NODE": "false",
            "SPOTUNE_OPERATOR_HEAL_AFTER_SECONDS": "5",
        }
    )
    assert found.healing == GpuHealing(cordon=True, drain=True, after_seconds=5.0)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("IMAGES", "x", "SPOTUNE_OPERATOR_IMAGES is not a setting; there is SPOTUNE_OPERATOR_IMAGE"),
        ("HEALING", "true", "is not a setting"),
        ("PORT", "http", "SPOTUNE_OPERATOR_PORT is 'http': give a whole number"),
        ("PORT", "65536", "ports end at 65535"),
        ("PASSES", "1.5", "give a whole number"),
        ("PASSES", "0", "give a number above 0"),
        ("POLLS", "-1", "give a number above 0"),
        ("POLL_SECONDS", "0", "give a number above 0"),
        ("POLL_SECONDS", "nan", "give a number above 0"),
        ("RETRY_SECONDS", "inf", "give a number above 0"),
        ("SETTLE_SECONDS", "-0.1", "give a number from 0"),
        ("STOP_SECONDS", "1m", "give a number"),
        ("HEAL_CORDON", "yes", "give true or false"),
        ("HEAL_AT_ONCE", "some", "give a whole number"),
        ("HEAL_DRAIN", "true", "drain needs cordon"),
    ],
)
def test_wrong_settings_are_refused_with_what_is_allowed(name: str, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        Settings.from_environment({PREFIX + name: text})


@pytest.mark.parametrize("name", ["SETTLE_SECONDS", "UNREACHABLE_SECONDS", "STOP_SECONDS", "HEAL_AFTER_SECONDS"])
def test_waits_that_may_be_left_out_may_be_zero(name: str) -> None:
    Settings.from_environment({PREFIX + name: "0"})
