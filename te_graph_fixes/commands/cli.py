"""The command line, all but ``te-graph-fixes run``. Only ``verify`` imports torch or TransformerEngine (TE).

The docstring of a command is its help.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..decision import Decision, expected
from ..fixes import CATALOGUE
from ..importing import PACKAGE
from ..patching import TE
from ..patching.source import Source, TENotFoundError
from ..report import te_name
from ..settings import COMMAND, DISABLE, Settings, fix_ids, option, unknown_variables
from ..stamp import ChangedStampError, ReplacedError, digest, of_source
from ..status import REFUSED, Status
from ..version import __version__
from . import answers, bake
from .bake import BakeError

NOT_USABLE = 2  # wrong use, no TE or no GPU
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _parser.parse_args(arguments)
    try:
        return int(options.command(options))
    except (TENotFoundError, ValueError) as error:
        return _say(error, NOT_USABLE)
    except (BakeError, ChangedStampError) as error:
        return _say(error, 1)


def _say(message: object, status: int = 0) -> int:
    print(f"te-graph-fixes: {message}", file=sys.stderr)
    return status


def _status(options: argparse.Namespace) -> int:
    """Say which known defects TE has, and whether they can be corrected.

    exit status: 0 every defect is or can be corrected, or is left out by you; 1 one cannot, or TE is to be baked again;
      2 no TE
    example: te-graph-fixes status --source /usr/lib/python3/dist-packages
    """
    decision = _decision(options)
    if options.json:
        print(json.dumps(answers.record(decision), indent=2))
    else:
        print(*answers.status(decision, options.all), sep="\n")
    return int(bool(decision.refused or decision.is_outdated))


def _explain(options: argparse.Namespace) -> int:
    """Explain one fix: its symptom, who has it, what it changes and costs, how to leave it out.

    exit status: 0; 2 no such fix, or no TE in --source
    example: te-graph-fixes explain warmup-reset
    """
    (fix_id,) = fix_ids([options.fix])
    decision = None
    try:
        decision = _decision(options, Settings())
    except TENotFoundError as error:
        if options.source is not None:
            raise
        _say(f"{error}, so the lines about it are left out")
    print(*answers.explain(CATALOGUE[fix_id], decision), sep="\n")
    return 0


def _diff(options: argparse.Namespace) -> int:
    """Print the change as a unified diff for `patch -p1`, all of it or none.

    exit status: 0; 1 a fix that is needed cannot be applied; 2 no TE, or no such fix
    example: te-graph-fixes diff > te.patch
    """
    names = [name.strip() for word in options.fixes for name in word.split(",") if name.strip()]
    decision = _decision(options, Settings(fix_ids(names)) if names else None)
    _require_complete(decision)
    for fix_id in names:
        verdict = decision.decisions[fix_id]
        if verdict.status != Status.APPLICABLE:
            _say(f"{fix_id} is {verdict.status}: {verdict.reason}")
    if not (names or decision.to_apply):
        _say(f"no changes: `{COMMAND} status --all{option(decision.source)}` says why")
    sys.stdout.writelines(answers.unified(decision))
    return 0


def _bake(options: argparse.Namespace) -> int:
    """Write the changes into TE's files, all or none; for image builds.

    exit status: 0 all that this TE needs is in or left out; 1 nothing was changed, and why (--check: it is not in);
      2 no TE
    example: te-graph-fixes bake
    """
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
            if not interrupted:
                print(bake.undo(source))
            return 0
    except OSError as error:
        advice = "see `status` for how TE is now, or write elsewhere with `bake --overlay DIR`"
        raise BakeError(f"{advice}: cannot write {error.filename or 'the files'}: {error.strerror}") from error


def _check_bake(decision: Decision) -> int:
    print(answers.answer(decision))
    is_in = (Status.NOT_NEEDED, Status.NOT_APPLICABLE, Status.DISABLED)
    lacks = decision.is_outdated or any(verdict.status not in is_in for verdict in decision.verdicts.values())
    if lacks:
        print("the fixes that this te-graph-fixes has for it are not all in its files")
    return int(lacks)


def _bake_in_place(source: Source) -> int:
    """Bake; before it, undo an older bake, or what is left of one. If the new one is refused, the older one stays."""
    settings, location = _settings(), Path(source.location)
    try:
        stamp = of_source(source)
    except ReplacedError:
        print(bake.undo(source))
        stamp = None
    if stamp is None or not stamp.is_outdated:
        return _bake_anew(source, settings)
    older = bake.written(location, stamp)
    print(bake.undo(source))
    try:
        return _bake_anew(source, settings)
    except BaseException:
        bake.in_place(location, older)
        _say(f"the bake of {stamp.by} is in place again")
        raise


def _bake_anew(source: Source, settings: Settings) -> int:
    """Bake. Where TE could be imported before and no more, this is undone."""
    decision = Decision(source, settings)
    if decision.disagreement:
        raise BakeError(decision.disagreement)
    _require_complete(decision)
    if not decision.to_apply:
        if decision.left_out:
            raise BakeError(answers.answer(decision))
        print(answers.answer(decision))
        return 0
    where, location, files = option(source), Path(source.location), answers.corrected(decision)
    bake.in_place(location, files)
    if not where and (problem := _import_problem()):
        bake.undo(source)
        if not _import_problem():
            raise BakeError(f"all is as it was: TransformerEngine could not be imported with the fixes: {problem}")
        bake.in_place(location, files)
        _say(f"TransformerEngine cannot be imported here, with the fixes or without, so that was not tried: {problem}")
    left = f" ({len(decision.left_out)} left out by {settings.chosen_by})" if decision.left_out else ""
    print(
        f"{len(decision.to_apply)} fixes are now in {te_name(decision.version)} in {source.location}: "
        f"{len(files) - 1} modules{left}. Undo: {COMMAND} bake --undo{where}"
    )
    return 0


def _import_problem() -> str:
    """Why a new process cannot import the installed TE, which imports every module that is edited; "" where it can."""
    command = [sys.executable, "-c", f"import {PACKAGE}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stderr.strip().rpartition("\n")[2]
    return said or f"it ended with status {done.returncode}" if done.returncode else ""


def _overlay(decision: Decision, folder: Path) -> int:
    _require_complete(decision)
    if not decision.to_apply:
        raise BakeError("there is nothing to correct, so there is no overlay to make")
    if folder.exists() and any(folder.iterdir()):
        raise BakeError(f"name another folder: {folder} is not empty")
    root, files = Path(decision.source.location).parent, answers.corrected(decision)
    bake.write(folder, root, files)
    print(*(f"{folder}/{path} {root}/{path}" for path in files), sep="\n")
    return _say(f"mount each file over the second path of its line, read-only: {len(decision.to_apply)} fixes")


def _require_complete(decision: Decision) -> None:
    """Raise `BakeError` where a fix that TE needs cannot be applied."""
    if decision.why_none:
        raise BakeError(f"nothing was written: {decision.why_none}")
    if decision.refused:
        where = option(decision.source)
        reasons = "; ".join(f"{', '.join(ids)}: {reason}" for reason, ids in decision.refused.items())
        advice = f"to go on without a fix, name it in {DISABLE}; `{COMMAND} issue{where}` prints what a report needs"
        raise BakeError(f"{advice}. Nothing was written, because these cannot be applied: {reasons}")


def _verify(options: argparse.Namespace) -> int:
    """Measure on a GPU each defect without and with the fixes.

    exit status: 0 every replay is right, bit for bit; 1 one is not, or was not measured;
      2 no TE, no GPU, or no such fix or case; 3 this TE cannot run some cases, and all others are right
    example: te-graph-fixes verify --quick
    """
    from ..verify.cases import select
    from ..verify.runner import no_gpu, verify

    _settings()
    cases = select(options.wanted, options.quick)
    on_disk = of_source(Source.installed()) is not None
    if reason := no_gpu():
        return _say(f"verify needs a GPU: {reason}", NOT_USABLE)
    return verify(cases, options.json, options.limit, on_disk)


def _issue(options: argparse.Namespace) -> int:
    """Print what a report about a TE that is not recognised needs, and nothing else.

    It has versions, verdicts, and digests of the files that they are about; of the source only lines that do not fit.

    exit status: 0; 2 no TE
    example: te-graph-fixes issue > report.txt
    """
    decision = _decision(options, Settings())
    source = decision.source
    print(f"te-graph-fixes {__version__}, {te_name(source.version)}")
    packages = [f"{name} {_installed(name)}" for name in ("torch", "megatron-core", "wrapt")]
    print(f"Python {platform.python_version()}, {', '.join(packages)}, {platform.system()} {platform.machine()}\n")
    for fix_id, verdict in decision.decisions.items():
        by_version = expected(CATALOGUE[fix_id], source.version)
        state = Status.NOT_NEEDED if verdict.status == Status.NOT_APPLICABLE else verdict.status
        print(f"{fix_id}: {verdict.status}" + (f" (expected: {by_version})" if by_version not in (None, state) else ""))
        if verdict.status in REFUSED:
            explanation = verdict.details or verdict.reason
            names = {source.location: TE, os.path.dirname(source.location): "DIR", sys.executable: "python"}
            for path, name in names.items():
                explanation = explanation.replace(path, name)
            print("    " + explanation.replace("\n", "\n    "))
    print()
    for name in source.modules_read:
        text = source.module(name).text
        print(f"{digest(text.encode())[:16]}  {answers.module_path(source, name)}")
    return _say("send it to whoever gave you the package")


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except Exception:  # not there, or its metadata is broken
        return "-"


def _list(options: argparse.Namespace) -> int:
    """List all fixes: symptom, versions with the defect, upstream.

    exit status: 0
    example: te-graph-fixes list
    """
    if options.json:
        print(json.dumps(answers.records(), indent=2))
    else:
        print(*answers.listing(), sep="\n")
    return 0


def _decision(options: argparse.Namespace, settings: Settings | None = None) -> Decision:
    """The decision on the TE that the options name, by these settings or the environment's."""
    settings = settings or _settings()  # what is wrong there is said first
    return Decision(_source(options), settings)


def _settings() -> Settings:
    """The environment's settings, after a sentence for each variable there that is none."""
    for text in unknown_variables():
        _say(text)
    return Settings.read()


def _source(options: argparse.Namespace) -> Source:
    return Source.installed() if options.source is None else Source.at(options.source)


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


def _add(function: Callable[[argparse.Namespace], int], *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Make a command of a function, with the options of ``parents``."""
    title, _, details = str(inspect.getdoc(function)).replace("te-graph-fixes", COMMAND).partition("\n\n")
    parser = _commands.add_parser(
        function.__name__.removeprefix("_"),
        help=title.removesuffix("."),
        description=title,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=parents,
    )
    parser.set_defaults(command=function)
    return parser


_of_te = argparse.ArgumentParser(add_help=False)
_of_te.add_argument("--source", metavar="DIR", help="a site-packages folder or checkout that holds TE")
_as_json = argparse.ArgumentParser(add_help=False)
_as_json.add_argument("--json", action="store_true", help="print JSON")

_add(_status, _of_te, _as_json).add_argument(
    "--all", action="store_true", help="also the defects that it does not have"
)
_add(_explain, _of_te).add_argument("fix", metavar="FIX")
_add(_diff, _of_te).add_argument("fixes", nargs="*", metavar="FIX", help="the fixes to show (default: all that apply)")
_instead = _add(_bake, _of_te).add_mutually_exclusive_group()
_instead.add_argument("--check", action="store_true", help="only say whether all that this TE needs is in")
_instead.add_argument("--undo", action="store_true", help="give TE's files their very bytes back")
_instead.add_argument("--overlay", metavar="DIR", help="write the files into DIR, to be mounted over TE's")
_of_cases = _add(_verify, _as_json)
_of_cases.add_argument("wanted", nargs="*", metavar="FIX", help="fixes, or single cases (default: all)")
_of_cases.add_argument("--quick", action="store_true", help="one or two cases for each fix")
_of_cases.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="time for a case (60)")
_commands.add_parser("run", help="Start a program with the fixes in it and its children")  # `__main__` starts it
_add(_issue, _of_te)
_add(_list, _as_json)
