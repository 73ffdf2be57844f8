"""The operator's settings from its environment, and errors for invalid ones."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest

from spotune.errors import UsageError
from spotune_operator.settings import PREFIX, GpuHealing, Settings


def test_all_settings_have_defaults() -> None:
    assert Settings.from_environment({"PATH": "/bin", "KUBECONFIG": "x"}) == Settings()


def test_every_setting_is_a_variable_and_documented() -> None:
    changed: dict[type, Any] = {str: "other", int: 77, float: 7.5, bool: True}
    for item in fields(Settings):
        if item.name in ("healing", "prices"):
            continue
        value: Any = changed[type(item.default)]
        variable = f"{PREFIX}{item.name.upper()}"
        found = Settings.from_environment({variable: str(value)})
        assert getattr(found, item.name) == value
        assert found == replace(Settings(), **{item.name: value})
        assert re.search(rf"^ +{item.name}: [A-Z]", Settings.__doc__ or "", re.MULTILINE), item.name


@pytest.mark.parametrize(
    ("text", "namespaces"), [("", ("",)), ("a", ("a",)), ("a,b", ("a", "b")), (" b , a,,b", ("b", "a")), (" , ", ("",))]
)
def test_namespaces_are_separated_by_commas(text: str, namespaces: tuple[str, ...]) -> None:
    assert Settings.from_environment({f"{PREFIX}WATCH_NAMESPACES": text}).namespaces == namespaces


def test_every_healing_step_is_a_variable() -> None:
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
        ("IMAGES", "x", "SPOTUNE_OPERATOR_IMAGES is not a setting; the settings are SPOTUNE_OPERATOR_IMAGE"),
        ("HEALING", "true", "is not a setting"),
        ("PORT", "http", "SPOTUNE_OPERATOR_PORT is 'http': give a whole number"),
        ("PORT", "65536", "the highest port is 65535"),
        ("MAX_CONCURRENT_RECONCILES", "1.5", "give a whole number"),
        ("MAX_CONCURRENT_RECONCILES", "0", "give a number above 0"),
        ("MAX_CONCURRENT_POLLS", "-1", "give a number above 0"),
        ("POLL_SECONDS", "0", "give a number above 0"),
        ("POLL_SECONDS", "nan", "give a number above 0"),
        ("RETRY_SECONDS", "inf", "give a number above 0"),
        ("DEBOUNCE_SECONDS", "-0.1", "give a number from 0"),
        ("STOP_SECONDS", "1m", "give a number"),
        ("HEAL_CORDON", "yes", "give true or false"),
        ("HEAL_AT_ONCE", "some", "give a whole number"),
        ("HEAL_DRAIN", "true", "drain needs cordon"),
    ],
)
def test_invalid_setting_is_refused_with_the_accepted_values(name: str, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        Settings.from_environment({PREFIX + name: text})


@pytest.mark.parametrize("name", ["DEBOUNCE_SECONDS", "UNREACHABLE_SECONDS", "STOP_SECONDS", "HEAL_AFTER_SECONDS"])
def test_waits_that_may_be_left_out_may_be_zero(name: str) -> None:
    Settings.from_environment({PREFIX + name: "0"})
