"""Test the environment variables and their errors."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest

from te_graph_fixes.settings import CHECK, DISABLE, STRICT, SWITCH, VERBOSE, Settings, unknown_variables


def read(environ: dict[str, str], **arguments: Any) -> Settings:
    """Return the settings that follow from environment variables and from the arguments of `activate`."""
    with mock.patch.dict(os.environ, environ):
        return Settings.read(**arguments)


@pytest.mark.parametrize("value", ["", " ", "on", "ON", "1", "true", "yes", "off", "OFF", "0", "false", " no "])
def test_all_or_nothing(value: str) -> None:
    settings = read({SWITCH: value})
    assert settings.off == (value.strip().lower() in ("off", "0", "false", "no"))
    assert settings.only == (frozenset() if settings.off else None)
    assert read({}) == Settings()


def test_arguments_take_the_place_of_the_environment() -> None:
    environ = {SWITCH: "off", DISABLE: "warmup-reset", STRICT: "1"}
    chosen = {"only": ["warmup-reset"], "disable": [], "strict": False}
    assert read(environ, **chosen) == Settings(frozenset({"warmup-reset"}))
    assert read({SWITCH: ""}, disable=["warmup-reset"], strict=True) == Settings(
        None, frozenset({"warmup-reset"}), True
    )


@pytest.mark.parametrize("name", [DISABLE, STRICT, VERBOSE])
def test_off_ignores_the_other_variables(name: str) -> None:
    assert read({SWITCH: "off", name: "nonsense"}) == Settings(frozenset())
    assert read({SWITCH: "off", STRICT: "1", VERBOSE: "1"}) == Settings(frozenset(), verbose=True)
    assert read({SWITCH: "off"}, disable=["nonsense"], strict="nonsense") == Settings(frozenset())


@pytest.mark.parametrize(("value", "said"), [("1", True), ("ON", True), ("0", False), ("off", False), ("", None)])
def test_a_flag(value: str, said: bool | None) -> None:
    settings = read({STRICT: value, VERBOSE: value})
    assert (settings.strict, settings.verbose) == (bool(said), said)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({SWITCH: "wormup-reset"}, f"{SWITCH}: unknown fix wormup-reset. Did you mean warmup-reset? Valid: on, "),
        ({SWITCH: "warmup-reset,b,a"}, f"{SWITCH}: unknown fix a, b. Valid: on, off, upstream, "),
        ({SWITCH: "off,warmup-reset"}, f"{SWITCH}: unknown fix off. Valid: on, off, upstream, "),
        ({DISABLE: "on"}, f"{DISABLE}: unknown fix on. Valid: the ids that `te-graph-fixes list` prints"),
        ({SWITCH: ","}, f"{SWITCH}=',' names no fix. Unset it, or see `te-graph-fixes list`."),
        ({VERBOSE: "2"}, f"{VERBOSE}='2' is invalid. Valid values: 1, true, yes, on, 0, false, no, off"),
        ({SWITCH: "of"}, f"{SWITCH}: unknown fix of. Did you mean off? Valid: on, off, upstream, the ids that "),
        ({STRICT: "2"}, f"{STRICT}='2' is invalid. Valid values: 1, true, yes, on, 0, false, no, off"),
    ],
)
def test_what_is_not_understood_is_an_error_that_lists_what_is(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as failure:  # noqa: PT011
        read(environ)
    assert str(failure.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "intended"),
    [
        ("TE_GRAPH_FIXES_DISBALE", DISABLE),
        ("TE_GRAPH_FIXES_DISABLED", DISABLE),
        ("TE_GRAPH_FIXES_STRCIT", STRICT),
        ("TE_GRAPH_FIXES_CHEK", CHECK),
        ("TE_GRAPH_FIXES_VERSION", VERBOSE),
    ],
)
def test_an_unknown_variable_of_ours_is_ignored_with_a_message(name: str, intended: str) -> None:
    environ = {name: "1", "TE_VERSION": "2.14", "NVTE_FUSED_ATTN": "1", "TE_GRAPH": "1"}
    with mock.patch.dict(os.environ, environ):
        assert Settings.read() == Settings()
        (said,) = unknown_variables()
    assert said.startswith(f"Ignoring {name}: te-graph-fixes has no such variable. Did you mean {intended}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"only": [5, "warmup-reset"]}, "only: unknown fix 5. Valid: "),
        ({"only": "warmup-reset"}, "only must be a collection of fix ids, not the string 'warmup-reset'"),
        ({"disable": "warmup-reset"}, "disable must be a collection of fix ids, not the string 'warmup-reset'"),
        ({"strict": 2}, "strict=2 is invalid. Valid values: "),
    ],
)
def test_arguments_that_are_not_understood(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as failure:  # noqa: PT011
        Settings.read(**arguments)
    assert str(failure.value).startswith(message)
