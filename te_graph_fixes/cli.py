"""The command line, all but ``te-graph-fixes run``. Only ``verify`` imports torch or TransformerEngine (TE)."""

from __future__ import annotations

import argparse
import difflib
import io
import itertools
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from . import __version__
from .engine import EngineError, patched
from .fix import APPLICABLE, UNRECOGNIZED
from .fixes import CATALOGUE
from .settings import Settings, fix_ids
from .source import TE, Source, TENotFoundError
from .verdicts import Reading, expected

NO_TE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except TENotFoundError as error:
        return _fail(NO_TE, str(error))
    except (ValueError, EngineError) as error:
        return _fail(1, str(error))


def _fail(status: int, message: str) -> int:
    print(f"te-graph-fixes: {message}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="te-graph-fixes",
        description="Correct, in memory, the CUDA-graph defects of the installed TransformerEngine (TE).",
    )
    parser.add_argument("--version", action="version", version=f"te-graph-fixes {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    status = commands.add_parser("status", help="what the installed TE, or a source tree, has and needs")
    _add_source(status)
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(command=_status)

    diff = commands.add_parser("diff", help="the change as a unified diff for `patch -p1`")
    _add_source(diff)
    diff.add_argument("fixes", nargs="*", metavar="FIX", help="the fixes to show (default: all that apply)")
    diff.set_defaults(command=_diff)

    verify = commands.add_parser("verify", help="on a GPU: measure each defect without and with the fixes")
    verify.add_argument("wanted", nargs="*", metavar="FIX", help="fixes, or single cases (default: all)")
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.add_argument("--quick", action="store_true", help="one or two cases for each fix")
    verify.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="time for one case (default: 60)")
    verify.set_defaults(command=_verify)

    # For the list of commands only: `__main__` starts `run` without this module.
    commands.add_parser("run", help="start a program with the fixes active in it and its children")

    issue = commands.add_parser("issue", help="what a report about a TE that is not recognised needs, and nothing else")
    _add_source(issue)
    issue.set_defaults(command=_issue)

    listing = commands.add_parser("list", help="the catalogue of fixes")
    listing.set_defaults(command=_list)
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", metavar="DIR", help="a site-packages folder or checkout that holds TE")


def _status(options: argparse.Namespace) -> int:
    reading = _reading(options, Settings.read())
    source, chosen = reading.source, reading.chosen
    if options.json:
        print(json.dumps(_status_dict(reading), indent=2))
    else:
        version = source.version or "(version unknown)"
        print(f"TransformerEngine {version} in {source.location} (te-graph-fixes {__version__})")
        width = max(map(len, CATALOGUE))
        for fix_id, verdict in chosen.items():
            print(f"  {fix_id:{width}}  {verdict.verdict:14}  {reading.reason(fix_id)}")
    return int(any(verdict.verdict == UNRECOGNIZED for verdict in chosen.values()))


def _reading(options: argparse.Namespace, settings: Settings) -> Reading:
    """What `te_graph_fixes.activate` with these settings does to the TE that the options name."""
    source = Source.installed() if options.source is None else Source.at(options.source)
    return Reading(source, settings)


def _status_dict(reading: Reading) -> dict[str, object]:
    version = reading.version
    return {
        "te_graph_fixes_version": __version__,
        "te_version": version,
        "source": reading.source.location,
        "fixes": {
            fix_id: {
                "verdict": verdict.verdict,
                "expected": expected(CATALOGUE[fix_id], version),
                "reason": reading.reason(fix_id),
                "upstream": list(CATALOGUE[fix_id].upstream),
            }
            for fix_id, verdict in reading.chosen.items()
        },
    }


def _diff(options: argparse.Namespace) -> int:
    names = options.fixes
    reading = _reading(options, Settings(fix_ids(names)) if names else Settings.read())
    for fix_id in names or CATALOGUE:
        verdict = reading.chosen[fix_id]
        if verdict.verdict == UNRECOGNIZED or (names and verdict.verdict != APPLICABLE):
            print(f"te-graph-fixes: {fix_id} is {verdict.verdict}: {verdict.reason}", file=sys.stderr)
    if not (names or reading.to_apply):
        print("te-graph-fixes: no changes: `te-graph-fixes status` says why", file=sys.stderr)
    for name, (before, after) in sorted(patched(reading.source, reading.to_apply.values()).items()):
        newline = reading.source.module(name).newline if before else "\n"
        sys.stdout.writelines(_unified(_path(reading.source, name), before, after, newline))
    return int(any(verdict.verdict == UNRECOGNIZED for verdict in reading.chosen.values()))


def _path(source: Source, module: str) -> str:
    found = source.find(module)
    parts = module.split(".")
    if found is not None and os.path.basename(found.path) == "__init__.py":
        parts.append("__init__")
    return str(PurePosixPath(*parts)) + ".py"


def _unified(path: str, before: str, after: str, newline: str) -> Iterator[str]:
    """A unified diff that `patch -p1` accepts, last lines without a line break included."""
    old = f"a/{path}" if before else "/dev/null"
    was, is_now = (io.StringIO(text).readlines() for text in (before, after))
    diff = difflib.unified_diff(was, is_now, old, f"b/{path}")
    yield from itertools.islice(diff, 2)
    for line in diff:
        if not line.endswith("\n"):
            yield f"{line}\n\\ No newline at end of file\n"
        else:
            yield line if line.startswith("@") else line[:-1] + newline


def _verify(options: argparse.Namespace) -> int:
    from .verify.cases import select
    from .verify.runner import no_gpu, verify

    Settings.read()
    cases = select(options.wanted, options.quick)
    Source.installed()
    reason = no_gpu()
    if reason:
        print(f"te-graph-fixes: verify needs a GPU: {reason}", file=sys.stderr)
        return NO_TE
    return verify(cases, options.json, options.limit)


def _issue(options: argparse.Namespace) -> int:
    """Versions, verdicts and digests of the files that they are about: no paths, variables or source text."""
    import hashlib

    reading = _reading(options, Settings())
    source = reading.source
    print(f"te-graph-fixes {__version__}, TransformerEngine {source.version or '(version unknown)'}")
    packages = ("torch", "megatron-core", "wrapt")
    known = [f"{name} {_installed(name) or '-'}" for name in packages]
    print(f"Python {platform.python_version()}, {', '.join(known)}, {platform.system()} {platform.machine()}\n")
    for fix_id, verdict in reading.chosen.items():
        guess = expected(CATALOGUE[fix_id], source.version)
        print(f"{fix_id}: {verdict.verdict}" + (f" (expected: {guess})" if guess != verdict.verdict else ""))
        if verdict.verdict == UNRECOGNIZED:
            print("    " + verdict.reason.replace(source.location, TE))
    print()
    for name in sorted(reading.modules):
        module = source.find(name)
        if module is not None:
            print(f"{hashlib.sha256(module.text.encode()).hexdigest()[:16]}  {_path(source, name)}")
    return 0


def _installed(name: str) -> str | None:
    from importlib.metadata import version

    try:
        return version(name)
    except Exception:  # not there, or its metadata is broken
        return None


def _list(_: argparse.Namespace) -> int:
    for fix in CATALOGUE.values():
        print(f"{fix.id}: {fix.summary}\n    symptom:  {fix.symptom}\n    versions: {fix.affected}")
        for link in fix.upstream:
            print(f"    upstream: {link}")
        for required in fix.requires:
            print(f"    requires: {required}")
    return 0
