"""The environment variables and their errors."""

from __future__ import annotations

from typing import Any

import pytest

from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.settings import DISABLE, STRICT, SWITCH, VERBOSE, Settings, unknown_variables


@pytest.mark.parametrize("value", [None, "", " ", "on", "ON", "1", "true", "yes"])
def test_everything_is_wanted_by_default(value: str | None) -> None:
    settings = Settings.read(environ={} if value is None else {SWITCH: value})
    assert settings == Settings()
    assert not settings.off
    assert all(settings.wants(fix) for fix in CATALOGUE)


@pytest.mark.parametrize("value", ["off", "OFF", "0", "false", " no "])
def test_everything_is_off(value: str) -> None:
    settings = Settings.read(environ={SWITCH: value})
    assert settings.off
    assert not any(settings.wants(fix) for fix in CATALOGUE)


def test_ids_choose_and_leave_out() -> None:
    environ = {SWITCH: " warmup-reset,, grouped-linear-skip-flag ", DISABLE: "warmup-reset,"}
    settings = Settings.read(environ=environ)
    assert {fix for fix in CATALOGUE if settings.wants(fix)} == {"grouped-linear-skip-flag"}


def test_upstream_means_what_upstream_has_merged() -> None:
    settings = Settings.read(environ={SWITCH: "Upstream", DISABLE: "warmup-reset"})
    wanted = {fix.id for fix in CATALOGUE.values() if settings.wants(fix.id)}
    assert wanted == {fix.id for fix in CATALOGUE.values() if fix.merged} - {"warmup-reset"}
    assert {"grouped-linear-skip-flag", "param-grad-lifetime"} <= wanted
    assert {CATALOGUE[fix].merged for fix in ("warmup-reset", "backward-dw-order")} == {"2.14", None}
    assert settings.with_required
    assert not Settings.read(["warmup-reset"], environ={SWITCH: "upstream"}).with_required


def test_arguments_take_the_place_of_the_environment() -> None:
    environ = {SWITCH: "off", DISABLE: "warmup-reset", STRICT: "1"}
    assert Settings.read(["warmup-reset"], [], False, environ) == Settings(frozenset({"warmup-reset"}))
    assert Settings.read(None, None, None, environ) == Settings(frozenset(), frozenset({"warmup-reset"}), True)


@pytest.mark.parametrize(("value", "strict"), [("1", True), ("ON", True), ("0", False), ("no", False), ("", False)])
def test_strict(value: str, strict: bool) -> None:
    assert Settings.read(environ={STRICT: value}).strict is strict


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {SWITCH: "wormup-reset"},
            f"{SWITCH}: unknown fix wormup-reset; did you mean warmup-reset? valid: on, ",
        ),
        (
            {SWITCH: "warmup-reset,b,a"},
            f"{SWITCH}: unknown fix a, b; valid: on, off, upstream, ",
        ),
        ({SWITCH: "off,warmup-reset"}, f"{SWITCH}: unknown fix off; valid: on, off, upstream, "),
        ({DISABLE: "on"}, f"{DISABLE}: unknown fix on; valid: see te-graph-fixes list"),
        ({SWITCH: ","}, f"{SWITCH}=',' names no fix: unset it, or see te-graph-fixes list"),
        ({DISABLE: " ,,"}, f"{DISABLE}=' ,,' names no fix: unset it, or see te-graph-fixes list"),
        ({VERBOSE: "2"}, f"{VERBOSE}='2' is not understood; valid: 1, true, yes, on, 0, false, no, off"),
        (
            {SWITCH: "of"},
            f"{SWITCH}: unknown fix of; did you mean off? valid: on, off, upstream, see te-graph-fixes list",
        ),
        ({STRICT: "2"}, f"{STRICT}='2' is not understood; valid: 1, true, yes, on, 0, false, no, off"),
    ],
)
def test_what_is_not_understood_is_an_error_that_lists_what_is(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as failure:  # noqa: PT011
        Settings.read(environ=environ)
    assert str(failure.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "intended"),
    [
        ("TE_GRAPH_FIX", SWITCH),
        ("TE_GRAPH_FIXE", SWITCH),
        ("TE_GRAHP_FIXES", SWITCH),
        ("TE_GRAPHS_FIXES", SWITCH),
        ("te_graph_fixes", SWITCH),
        ("TE_GRAPH_FIXES_DISBALE", DISABLE),
        ("TE_GRAPH_FIXES_DISABLED", DISABLE),
        ("TE_GRAPH_FIX_DISABLE", DISABLE),
        ("TE_GRAPH_FIXES_STRCIT", STRICT),
        ("TE_GRAPH_FIXES_CHEK", "TE_GRAPH_FIXES_CHECK"),
    ],
)
def test_a_mistyped_variable_is_an_error(name: str, intended: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is not a setting; did you mean {intended}\?$"):
        Settings.read(environ={name: "off"})


@pytest.mark.parametrize("name", ["VERSION", "WHEEL", "COMMIT", "CHECKOUT", "DIR", "HOME", "REF", "SHA256", "EXPECT"])
def test_another_variable_is_none_of_ours(name: str) -> None:
    environ = {f"TE_GRAPH_FIXES_{name}": "1", "TE_VERSION": "2.14", "NVTE_FUSED_ATTN": "1"}
    assert Settings.read(environ=environ) == Settings()
    said = f"TE_GRAPH_FIXES_{name} is not a setting of te-graph-fixes: it changes nothing"
    assert unknown_variables(environ) == [said]


@pytest.mark.parametrize(("value", "strict"), [(True, True), (1, True), ("on", True), ("off", False), (False, False)])
def test_strict_as_an_argument(value: bool, strict: bool) -> None:
    assert Settings.read(strict=value, environ={}).strict is strict


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"only": [5, "warmup-reset"]}, "only: unknown fix 5; valid: "),
        ({"only": b"warmup-reset"}, "only: unknown fix "),
        ({"strict": "maybe"}, "strict='maybe' is not understood; valid: "),
        ({"strict": 2}, "strict=2 is not understood; valid: "),
    ],
)
def test_arguments_that_are_not_understood(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as failure:  # noqa: PT011
        Settings.read(**arguments, environ={})
    assert str(failure.value).startswith(message)


@pytest.mark.parametrize(("value", "verbose"), [(None, None), ("", None), ("1", True), ("0", False), ("off", False)])
def test_verbose(value: str | None, verbose: bool | None) -> None:
    assert Settings.read(environ={} if value is None else {VERBOSE: value}).verbose is verbose


@pytest.mark.parametrize("arguments", [{"only": "warmup-reset"}, {"disable": "warmup-reset"}])
def test_a_string_is_no_collection_of_ids(arguments: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="must be a collection of fix ids, not the string 'warmup-reset'"):
        Settings.read(**arguments)  # type: ignore[arg-type]
