"""The command line: ``te-graph-fixes status | diff | verify | run | list``. Only ``verify`` imports torch or TE."""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from .engine import EngineError, patched
from .fix import APPLICABLE, UNRECOGNIZED, Verdict
from .fixes import CATALOGUE
from .source import Source, TENotFoundError, split_lines
from .verdicts import expected, surprise, unmet, verdicts

NO_TE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return int(options.command(options))
    except TENotFoundError as error:
        print(f"te-graph-fixes: {error}", file=sys.stderr)
        return NO_TE
    except (ValueError, EngineError) as error:
        print(f"te-graph-fixes: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="te-graph-fixes",
        description="Correct, in memory, the CUDA-graph defects of the installed TransformerEngine (TE).",
    )
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

    listing = commands.add_parser("list", help="the catalogue of fixes")
    listing.set_defaults(command=_list)
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", metavar="DIR", help="a site-packages folder or checkout that holds TE")


def _source(options: argparse.Namespace) -> Source:
    return Source.at(options.source) if options.source else Source.installed()


def _status(options: argparse.Namespace) -> int:
    source = _source(options)
    found = verdicts(source)
    if options.json:
        print(json.dumps(_status_dict(source, found), indent=2))
    else:
        print(f"TransformerEngine {source.version or '(version unknown)'} in {source.location}")
        width = max(map(len, CATALOGUE))
        for fix in CATALOGUE.values():
            verdict = found[fix.id]
            print(f"  {fix.id:{width}}  {verdict.verdict:14}  {_reason(source, fix.id, verdict)}")
    return int(any(verdict.verdict == UNRECOGNIZED for verdict in found.values()))


def _reason(source: Source, fix_id: str, verdict: Verdict) -> str:
    return "; ".join(filter(None, [verdict.reason, surprise(CATALOGUE[fix_id], verdict, source.version)]))


def _status_dict(source: Source, found: dict[str, Verdict]) -> dict[str, object]:
    return {
        "te_version": source.version,
        "source": source.location,
        "fixes": {
            fix_id: {
                "verdict": verdict.verdict,
                "expected": expected(CATALOGUE[fix_id], source.version),
                "reason": _reason(source, fix_id, verdict),
                "upstream": list(CATALOGUE[fix_id].upstream),
            }
            for fix_id, verdict in found.items()
        },
    }


def _diff(options: argparse.Namespace) -> int:
    source = _source(options)
    chosen = _chosen(options.fixes, verdicts(source))
    for name, (before, after) in sorted(patched(source, chosen.values()).items()):
        newline = source.module(name).newline if before else "\n"
        sys.stdout.writelines(_unified(_path(source, name), before, after, newline))
    return 0


def _chosen(ids: Sequence[str], found: dict[str, Verdict]) -> dict[str, Verdict]:
    """The applicable verdicts of the fixes ``ids`` (all if empty) whose requirements are met."""
    unknown = sorted(set(ids) - set(CATALOGUE))
    if unknown:
        raise ValueError(f"unknown fix {', '.join(unknown)}; valid: {', '.join(CATALOGUE)}")
    for fix_id in ids:
        if found[fix_id].verdict != APPLICABLE:
            print(f"te-graph-fixes: {fix_id} is {found[fix_id].verdict}: {found[fix_id].reason}", file=sys.stderr)
    chosen = {
        fix_id: verdict
        for fix_id, verdict in found.items()
        if verdict.verdict == APPLICABLE and (not ids or fix_id in ids)
    }
    for fix_id in list(chosen):
        required = unmet(CATALOGUE[fix_id], chosen, found)
        if required and ids:
            raise ValueError(f"{fix_id} requires {required}: one without the other is wrong; name both")
        if required:
            print(f"te-graph-fixes: {fix_id} is left out: it requires {required}", file=sys.stderr)
            del chosen[fix_id]
    return chosen


def _path(source: Source, module: str) -> str:
    found = source.find(module)
    parts = module.split(".")
    if found is not None and os.path.basename(found.path) == "__init__.py":
        parts.append("__init__")
    return str(PurePosixPath(*parts)) + ".py"


def _unified(path: str, before: str, after: str, newline: str) -> Iterator[str]:
    """A unified diff that `patch -p1` accepts, last lines without a line break included."""
    old = f"a/{path}" if before else "/dev/null"
    diff = difflib.unified_diff(split_lines(before), split_lines(after), old, f"b/{path}")
    yield from itertools.islice(diff, 2)
    for line in diff:
        if not line.endswith("\n"):
            yield f"{line}\n\\ No newline at end of file\n"
        else:
            yield line if line.startswith("@") else line[:-1] + newline


def _verify(options: argparse.Namespace) -> int:
    from .verify.cases import select
    from .verify.runner import no_gpu, verify

    cases = select(options.wanted, options.quick)
    Source.installed()
    reason = no_gpu()
    if reason:
        print(f"te-graph-fixes: verify needs a GPU: {reason}", file=sys.stderr)
        return NO_TE
    return verify(cases, options.json, options.limit)


def _list(_: argparse.Namespace) -> int:
    for fix in CATALOGUE.values():
        print(f"{fix.id}: {fix.summary}\n    symptom:  {fix.symptom}\n    versions: {fix.affected}")
        for link in fix.upstream:
            print(f"    upstream: {link}")
        for required in fix.requires:
            print(f"    requires: {required}")
    return 0
