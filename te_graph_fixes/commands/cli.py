"""The command line, all but ``te-graph-fixes run``. Only ``verify`` imports torch or TransformerEngine (TE)."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..decision import Decision, expected
from ..fixes import CATALOGUE
from ..messages import issues
from ..patching.installation import InstallationError
from ..patching.source import TE, Source, TENotFoundError
from ..report import te_name
from ..settings import COMMAND, Settings, fix_ids, unknown_variables
from ..stamp import NAME, ChangedStampError, digest, of_source, option
from ..state import State
from ..version import __version__
from . import answers, bake
from .bake import BakeError

NO_TE = WRONG_USE = 2
_EPILOG = f"""\
in this order:
  {COMMAND} status                    is my TE affected, and can it be corrected?
  {COMMAND} run torchrun train.py     start a job with the fixes in memory; nothing on disk changes
  {COMMAND} verify --quick            on a GPU: are graphs now eager, bit for bit?
  {COMMAND} run --check CMD           in the first steps of your own job: are its graphs eager?
  undo: without `run`, or with TE_GRAPH_FIXES=off, TE is as it was
for an image:
  {COMMAND} bake                      write the fixes into TE's files; the build fails if it cannot
  {COMMAND} bake --undo               give TE's files their very bytes back

Each command has -h, with its exit statuses and an example.
"""
_parser = argparse.ArgumentParser(
    prog=COMMAND,
    description="Correct the CUDA-graph defects of the installed TransformerEngine (TE).",
    epilog=_EPILOG,
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
_parser.add_argument("--version", action="version", version=f"te-graph-fixes {__version__}")
_parser.set_defaults(source=None)
_commands = _parser.add_subparsers(required=True, metavar="COMMAND")
COMMANDS: dict[str, argparse.ArgumentParser] = _commands.choices
Command = Callable[[argparse.Namespace], int]


def _argument(*names: str, **settings: Any) -> Callable[[argparse.ArgumentParser], object]:
    """What adds an argument to the parser of a command."""
    return lambda parser: parser.add_argument(*names, **settings)


SOURCE = _argument("--source", metavar="DIR", help="a site-packages folder or checkout that holds TE")
JSON = _argument("--json", action="store_true", help="print JSON")


def _command(what: str, statuses: str, example: str, *arguments: Any) -> Callable[[Command], Command]:
    """Make a command of the function below, whose help ends with its exit statuses and an example."""

    def add(function: Command) -> Command:
        name = function.__name__[1:]
        parser = _commands.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=f"exit status: {statuses}\nexample: {COMMAND} {name} {example}".rstrip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for add_to in arguments:
            add_to(parser)
        parser.set_defaults(command=function)
        return function

    return add


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options, unknown = _parser.parse_known_args(arguments)
    try:
        if unknown:
            name = options.command.__name__[1:]
            raise ValueError(f"{name} does not take {unknown[0]}; see {COMMAND} {name} -h")
        return int(options.command(options))
    except TENotFoundError as error:
        folders = [Path(folder, TE) for folder in (sys.path if options.source is None else [options.source])]
        left = "".join(
            f"; delete {each}: it holds what is left of a bake" for each in folders if (each / NAME).exists()
        )
        return _say(f"{error}{left}", NO_TE)
    except ValueError as error:
        return _say(error, WRONG_USE)
    except (InstallationError, BakeError, ChangedStampError) as error:
        return _say(error, 1)


def _say(message: object, status: int = 0) -> int:
    print(f"te-graph-fixes: {message}", file=sys.stderr)
    return status


@_command(
    "say which known defects TE has, and whether they can be corrected",
    "0 every defect is or can be corrected, or TE has none; 1 one cannot, or TE is to be baked again; 2 no TE",
    "--source /usr/lib/python3/dist-packages",
    SOURCE,
    JSON,
    _argument("--all", action="store_true", help="also the defects that this TE does not have"),
)
def _status(options: argparse.Namespace) -> int:
    decision = _decision(options)
    if options.json:
        fixes = {
            fix_id: {
                "verdict": verdict.state,
                "expected": expected(CATALOGUE[fix_id], decision.version),
                "reason": decision.reason(fix_id, options.source is not None),
                "upstream": list(CATALOGUE[fix_id].upstream),
            }
            for fix_id, verdict in decision.decisions.items()
        }
        about = {"te_version": decision.version, "source": decision.source.location, "fixes": fixes}
        print(json.dumps({"te_graph_fixes_version": __version__, **about}, indent=2))
    else:
        print(*answers.status(decision, options.all), sep="\n")
    return int(bool(decision.refused or decision.is_outdated))


@_command(
    "explain one fix: its symptom, who has it, what it changes and costs, how to leave it out",
    "0; 2 no such fix, or no TE",
    "warmup-reset",
    SOURCE,
    _argument("fix", metavar="FIX"),
)
def _explain(options: argparse.Namespace) -> int:
    (fix_id,) = fix_ids([options.fix])
    try:
        decision = _decision(options, Settings())
    except TENotFoundError as error:
        print(*answers.explain(CATALOGUE[fix_id]), sep="\n")
        return _say(error, NO_TE)
    print(*answers.explain(CATALOGUE[fix_id], decision), sep="\n")
    return 0


@_command(
    "print the change as a unified diff for `patch -p1`",
    "0; 1 a fix that is needed cannot be applied; 2 no TE, or no such fix",
    "> te.patch",
    SOURCE,
    _argument("fixes", nargs="*", metavar="FIX", help="the fixes to show (default: all that apply)"),
)
def _diff(options: argparse.Namespace) -> int:
    names = [name for word in options.fixes for name in word.split(",")]
    decision = _decision(options, Settings(fix_ids(names)) if names else None)
    for fix_id in names:
        verdict = decision.decisions[fix_id]
        if verdict.state not in (State.APPLICABLE, State.UNRECOGNIZED):
            _say(f"{fix_id} is {verdict.state}: {verdict.reason}")
    if decision.refusal:
        return _say(f"nothing is applied: {decision.refusal}", 1)
    for reason, ids in decision.refused.items():
        _say(f"{', '.join(ids)} cannot be applied, and the diff is without: {reason}")
    if not (names or decision.to_apply):
        _say(f"no changes: `{COMMAND} status --all{option(decision.source)}` says why")
    sys.stdout.writelines(answers.unified(decision))
    return int(bool(decision.refused))


@_command(
    "write the changes into TE's files, all or none; for image builds",
    "0 all that this TE needs is in or left out; 1 nothing was changed, and why (--check: it is not in); 2 no TE",
    "",
    SOURCE,
    _argument("--check", action="store_true", help="say whether all that this TE needs is in, and change nothing"),
    _argument("--undo", action="store_true", help="give TE's files their very bytes back"),
    _argument("--overlay", metavar="DIR", help="write the changed files into DIR, to be mounted, and leave TE alone"),
)
def _bake(options: argparse.Namespace) -> int:
    if sum(map(bool, (options.check, options.undo, options.overlay))) > 1:
        raise ValueError("bake takes one of --check, --undo and --overlay")
    if options.check:
        return _check_bake(_decision(options))
    try:
        if options.overlay:
            return _overlay(_decision(options), Path(os.path.abspath(options.overlay)))
        source = _source(options)
        with bake.changing(Path(source.location)) as interrupted:
            if interrupted:
                _say("took back what an interrupted command had left")
            if not options.undo:
                return _bake_in_place(source)
            if not interrupted or of_source(source):
                print(bake.undo(source))
            return 0
    except OSError as error:
        what = f"cannot write {error.filename or 'the files'}: {error.strerror}"
        raise BakeError(f"{what}. `status` says how TE is now; `bake --overlay DIR` writes elsewhere") from error


def _check_bake(decision: Decision) -> int:
    print(answers.answer(decision))
    is_in = (State.NOT_NEEDED, State.NOT_APPLICABLE, State.DISABLED)
    lacks = any(verdict.state not in is_in for verdict in decision.verdicts.values())
    if lacks and decision.stamp is None:
        can_be_baked = decision.to_apply and not decision.refused
        advice = f"; run `{COMMAND} bake{option(decision.source)}`" if can_be_baked else ""
        print(f"the fixes are not in the files{advice}")
    return int(lacks or decision.is_outdated)


def _bake_in_place(source: Source) -> int:
    """Bake, after an undo where the fixes of another te-graph-fixes are on disk, or what is left of them."""
    settings = _settings()
    decision = Decision(source, settings)
    try:
        stamp = of_source(source)
        outdated = stamp if decision.is_outdated else None
        if stamp and not outdated and decision.disagreement:
            raise BakeError(decision.disagreement)
    except ChangedStampError as error:
        outdated = error.leftover
    if outdated:
        bake.undo(source)
        print(f"the bake of {outdated.by} is undone")
        decision = Decision(Source.at(source.location), settings)
    _require_complete(decision)
    if not decision.to_apply:
        print(answers.answer(decision))
        return int(bool(decision.left_out))
    where = option(source)
    unable = "" if where else bake.import_problem()
    files = answers.corrected(decision)
    bake.in_place(Path(source.location), files)
    if unable:
        _say(f"TransformerEngine cannot be imported here, with the fixes or without, so that was not tried: {unable}")
    elif not where and (problem := bake.import_problem()):
        bake.undo(source)
        raise BakeError(f"all is as it was: TransformerEngine could not be imported with the fixes: {problem}")
    left = f" ({len(decision.left_out)} left out by {settings.chosen_by})" if decision.left_out else ""
    print(
        f"{len(decision.to_apply)} fixes are now in {te_name(decision.version)} in {source.location}: "
        f"{len(files) - 1} modules{left}. Undo: {COMMAND} bake --undo{where}"
    )
    return 0


def _overlay(decision: Decision, folder: Path) -> int:
    _require_complete(decision)
    if not decision.to_apply:
        raise BakeError("there is nothing to correct, so there is no overlay to make")
    if folder.exists() and any(folder.iterdir()):
        raise BakeError(f"{folder} is not empty: name another folder")
    root, files = Path(decision.source.location).parent, answers.corrected(decision)
    bake.write(folder, root, files)
    print(*(f"{folder}/{path} {root}/{path}" for path in files), sep="\n")
    return _say(f"mount each file over the second path of its line, read-only: {len(decision.to_apply)} fixes")


def _require_complete(decision: Decision) -> None:
    """Raise `BakeError` where a fix that TE needs cannot be applied."""
    if decision.refused:
        reasons = "; ".join(f"{', '.join(ids)}: {reason}" for reason, ids in decision.refused.items())
        why = decision.refusal or f"not every fix that is needed can be applied. {reasons}"
        raise BakeError(f"nothing was written: {why}")


@_command(
    "measure on a GPU each defect without and with the fixes",
    """0 every replay is right, bit for bit; 1 one is not, or was not measured;
  2 no TE, no GPU, or no such fix or case; 3 this TE cannot run some cases, and all others are right""",
    "--quick",
    _argument("wanted", nargs="*", metavar="FIX", help="fixes, or single cases (default: all)"),
    JSON,
    _argument("--quick", action="store_true", help="one or two cases for each fix"),
    _argument("--limit", type=float, default=60.0, metavar="SECONDS", help="time for one case (default: 60)"),
)
def _verify(options: argparse.Namespace) -> int:
    from ..verify.cases import select
    from ..verify.runner import no_gpu, verify

    _settings()
    cases = select(options.wanted, options.quick)
    on_disk = of_source(Source.installed()) is not None
    if reason := no_gpu():
        return _say(f"verify needs a GPU: {reason}", NO_TE)
    return verify(cases, options.json, options.limit, on_disk)


def _run(options: argparse.Namespace) -> int:
    """Refuse an option before `run`, which `__main__` starts without this module."""
    raise ValueError(f"write `run` first: {COMMAND} run CMD")


_commands.add_parser("run", help="start a program with the fixes in it and its children").set_defaults(command=_run)


@_command(
    "print what a report about a TE that is not recognised needs, and nothing else",
    "0; 2 no TE",
    "> report.txt",
    SOURCE,
)
def _issue(options: argparse.Namespace) -> int:
    """Versions, verdicts and digests of the files that they are about; of the source only lines that do not fit."""
    decision = _decision(options, Settings())
    source = decision.source
    print(f"te-graph-fixes {__version__}, {te_name(source.version)}")
    packages = [f"{name} {_installed(name)}" for name in ("torch", "megatron-core", "wrapt")]
    print(f"Python {platform.python_version()}, {', '.join(packages)}, {platform.system()} {platform.machine()}\n")
    for fix_id, verdict in decision.decisions.items():
        print(f"{fix_id}: {verdict.state} (expected: {expected(CATALOGUE[fix_id], source.version)})")
        if verdict.state in (State.UNRECOGNIZED, State.FAILED):
            explanation = verdict.explanation
            names = {source.location: TE, os.path.dirname(source.location): "DIR", sys.executable: "python"}
            for path, name in names.items():
                explanation = explanation.replace(path, name)
            print("    " + explanation.replace("\n", "\n    "))
    print()
    for name in source.read:
        text = source.module(name).text
        print(f"{digest(text.encode())[:16]}  {answers.module_path(source, name)}")
    return _say(f"report it at {issues()}" if issues() else "send it to whoever gave you the package")


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except Exception:  # not there, or its metadata is broken
        return "-"


@_command("list all fixes: symptom, versions with the defect, upstream", "0", "", JSON)
def _list(options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps(answers.records(), indent=2))
    else:
        print(*answers.listing(), sep="\n")
    return 0


def _decision(options: argparse.Namespace, settings: Settings | None = None) -> Decision:
    """What is done, by these settings or the environment's, to the TE that the options name."""
    settings = settings or _settings()  # what is wrong there is said first
    return Decision(_source(options), settings)


def _settings() -> Settings:
    """Those of the environment, after a word on each variable there that is none."""
    for text in unknown_variables():
        _say(text)
    return Settings.read()


def _source(options: argparse.Namespace) -> Source:
    return Source.installed() if options.source is None else Source.at(options.source)
