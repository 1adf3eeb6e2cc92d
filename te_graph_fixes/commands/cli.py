"""The command line, except ``te-graph-fixes run``.

No command imports torch or TransformerEngine (TE) into its own process. The docstring of a command is its help text.
"""

import argparse
import importlib.metadata
import inspect
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..decision import Decision, Reading, decide, read, settings_conflict
from ..fixes import CATALOGUE, assess
from ..manifest import UNDO, BakeError, Manifest, digest
from ..patching import PACKAGE, TE
from ..patching.installation import InstallationError
from ..patching.source import Source, TENotFoundError
from ..settings import DISABLE, Settings, fix_ids, unknown_variables
from ..status import Status, Verdict
from ..text import by_value, print_stderr, te_name
from ..version import __version__
from . import NOT_USABLE, bake, texts

_EPILOG = """\
use in this order:
  te-graph-fixes status                   list the bugs of your TE
  te-graph-fixes run torchrun train.py    start a job with the fixes in memory; nothing on disk changes
  te-graph-fixes run --check CMD          compare the graphs of your own job with eager runs, in its first steps
  undo: start without `run`, or set TE_GRAPH_FIXES=off (a baked TE: bake --undo)
for an image:
  te-graph-fixes bake                     write the fixes into TE's files; fails if a needed fix cannot be applied
  te-graph-fixes bake --undo              restore TE's files byte for byte

`te-graph-fixes COMMAND -h` describes a command, with its exit statuses and an example.
In a checkout that is not installed, type `python -m te_graph_fixes` instead of `te-graph-fixes`.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _parser.parse_args(arguments)
    try:
        return int(options.command(options))
    except (TENotFoundError, ValueError) as error:
        _note(error)
        return NOT_USABLE
    except (BakeError, InstallationError) as error:
        _note(error)
        return 1


def _note(message: object) -> None:
    print_stderr(f"te-graph-fixes: {message}")


def _print_result(text: str) -> None:
    """Print ``text`` on standard output. Ignore a full or closed output, because the exit status shows the result."""
    try:
        if sys.stdout:
            print(text, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - Python flushes the stream again when it exits


def _status(options: argparse.Namespace) -> int:
    """List the known bugs of TE, and whether they can be fixed.

    exit status: 0 every bug is fixed, can be fixed, or its fix is disabled; 1 a fix cannot be applied, or another
      version of te-graph-fixes baked this TE; 2 no TE, or an invalid variable
    example: te-graph-fixes status --source /usr/lib/python3/dist-packages
    """
    decision = _decision(options)
    if options.json:
        print(json.dumps(texts.record(decision), indent=2))
    else:
        print(*texts.status(decision, options.all, _where(options)), sep="\n")
    return int(bool(decision.cannot_apply or decision.outdated))


def _explain(options: argparse.Namespace) -> int:
    """Explain one fix: the bug, the affected jobs, the change, its cost, and how to disable it.

    exit status: 0; 2 no such fix
    example: te-graph-fixes explain warmup-reset
    """
    (fix_id,) = fix_ids([options.fix])
    print(*texts.explain(CATALOGUE[fix_id]), sep="\n")
    return 0


def _diff(options: argparse.Namespace) -> int:
    """Print the fixes as one unified diff for `patch -p1`, all or none.

    exit status: 0; 1 a needed fix cannot be applied; 2 no TE, no such fix, or an invalid variable
    example: te-graph-fixes diff > te.patch
    """
    names = [name.strip() for word in options.fixes for name in word.split(",") if name.strip()]
    decision = _decision(options, Settings(fix_ids(names)) if names else None)
    _require_complete(decision)
    for fix_id in names:
        fix = decision.fixes[fix_id]
        if fix.status != Status.PENDING:
            _note(f"{fix_id} is {fix.status}: {fix.reason}")
    if not (names or decision.to_apply):
        _note(f"No changes. For the reasons, run `te-graph-fixes status --all{_where(options)}`.")
    sys.stdout.writelines(bake.unified(decision))
    return 0


def _bake(options: argparse.Namespace) -> int:
    """Write the fixes into TE's files, all or none, for example while you build an image.

    exit status: 0 all needed fixes but the disabled ones are baked; 1 nothing was baked, for example because all are
      disabled (--check: a needed fix is missing; --undo: see `te-graph-fixes status`); 2 no TE, or an invalid variable;
      130 interrupted
    example: te-graph-fixes bake
    """
    if options.force and not options.undo:
        raise ValueError("--force works only with --undo.")
    if options.check:
        return _check_bake(_decision(options), _where(options))
    for number in bake.SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores SIGHUP
            signal.signal(number, signal.default_int_handler)
    try:
        if options.overlay:
            _overlay(_decision(options), Path(os.path.abspath(options.overlay)))
            return 0
        source = _source(options)
        with bake.locked(Path(source.location), _note):
            done = bake.undo(source, options.force) if options.undo else _bake_in_place(source, _where(options))
        if not done:
            raise BakeError(f"Nothing to undo: {source.location} has not been baked.")
    except OSError as error:
        advice = "Check TE with `te-graph-fixes status`, or write elsewhere with `te-graph-fixes bake --overlay DIR`."
        file = str(error.filename2 or error.filename or "the files").partition(bake.MARK)[0]
        raise BakeError(f"Cannot write {file}: {error.strerror}. {advice}") from error
    except KeyboardInterrupt:
        _note("Interrupted. To see which fixes are baked, run `te-graph-fixes status`.")
        return 128 + signal.SIGINT
    _print_result(done)
    return 0


def _check_bake(decision: Decision, where: str) -> int:
    is_missing = bool(decision.to_apply or decision.cannot_apply or decision.outdated)
    advice = f"\nNot all needed fixes are baked. Run:\n  te-graph-fixes bake{where}" if is_missing else ""
    _print_result(texts.summary_line(decision) + advice)
    return int(is_missing)


def _bake_in_place(source: Source, where: str) -> str:
    """Bake the fixes into TE, and return a message for the user.

    Replace an earlier bake that is outdated, incomplete or not intact. If TE is the installed TE, and could be imported
    before the bake but not after it, undo the bake.
    """
    settings, location = _settings(), Path(source.location)
    reading, earlier = read(source), Manifest.read(location)
    is_unrecognized = any(found.verdict == Verdict.UNRECOGNIZED for found in reading.assessments.values())
    replaced = earlier if earlier and (earlier.outdated or is_unrecognized) else None
    if replaced:
        source = bake.source_before(source, replaced)
        reading = Reading(source, assess(source))
    decision = decide(reading, settings)
    if conflict := settings_conflict(decision):
        raise BakeError(conflict)
    _require_complete(decision)
    if replaced:
        _note(bake.undo(source))
    if not decision.to_apply:
        summary = texts.summary_line(decision)
        if decision.disabled:
            raise BakeError(f"{summary} Nothing was baked. To bake these fixes, unset {settings.disabled_by}.")
        return summary
    files, problem_before = bake.baked_files(decision), "" if where else _import_problem()
    try:
        bake.write_in_place(source, files)
        if not where and not problem_before and (problem := _import_problem()):
            raise BakeError(f"Nothing was baked: TransformerEngine cannot be imported with the fixes: {problem}")
    except BaseException:
        bake.undo(source)
        raise
    if problem_before:
        _note(f"The bake was not tested: TransformerEngine cannot be imported even without fixes: {problem_before}")
    disabled = f", {len(decision.disabled)} disabled by {settings.disabled_by}" if decision.disabled else ""
    te, modules = te_name(source.version), len(files) - 1
    baked = f"Baked {len(decision.to_apply)} fixes into {te} ({modules} modules in {location}{disabled})"
    return f"{baked}. Undo:\n  {UNDO}{where}"


def _import_problem() -> str:
    """Import the installed TE, with every edited module, in a new process. Return the error, or "" after a success."""
    # Use this process's `sys.path`, because `python -c` would add the current folder.
    program = f"import sys; sys.path[:] = {sys.path!r}; import {PACKAGE}"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last_line = done.stderr.strip().rpartition("\n")[2]
    return last_line or f"the import ended with status {done.returncode}" if done.returncode else ""


def _overlay(decision: Decision, folder: Path) -> None:
    _require_complete(decision)
    if not decision.to_apply:
        raise BakeError("No overlay was written, because there is nothing to fix.")
    if folder.exists() and any(folder.iterdir()):
        raise BakeError(f"{folder} is not empty. Name another folder.")
    root, files = Path(decision.source.location).parent, bake.baked_files(decision)
    bake.write_files(folder, root, files)
    _print_result("\n".join(f"{folder}/{path} {root}/{path}" for path in files))
    _note(f"Wrote {len(decision.to_apply)} fixes. Mount each file, read-only, at the second path of its line.")


def _require_complete(decision: Decision) -> None:
    """Raise `BakeError` if a fix that TE needs cannot be applied."""
    if decision.unusable_reason:
        raise BakeError(f"Nothing was written: {decision.unusable_reason}")
    if decision.cannot_apply:
        reasons = by_value(decision.cannot_apply)
        lines = [f"  {', '.join(ids)}: {reason}" for reason, ids in reasons.items()]
        advice = f"To continue without a fix, add it to {DISABLE}. To report the problem, run:\n  te-graph-fixes issue"
        raise BakeError("\n".join(["Nothing was written, because these fixes cannot be applied:", *lines, advice]))


def _issue(options: argparse.Namespace) -> int:
    """Print the content of a bug report about a TE whose source is unrecognized.

    The report contains versions, verdicts, file digests, and the lines of code that do not match TE's source.

    exit status: 0 the report was printed; 2 no TE
    example: te-graph-fixes issue > report.txt
    """
    reading = read(_source(options))
    source = reading.source
    print(f"te-graph-fixes {__version__}, {te_name(source.version)}")
    packages = [f"{name} {_installed(name)}" for name in ("torch", "megatron-core", "wrapt")]
    print(f"Python {platform.python_version()}, {', '.join(packages)}, {platform.system()} {platform.machine()}\n")
    for fix_id, found in reading.assessments.items():
        print(f"{fix_id}: {found.verdict}")
        if found.verdict == Verdict.UNRECOGNIZED:
            explanation = found.details or found.reason
            names = {source.location: TE, os.path.dirname(source.location): "DIR", str(sys.executable): "python"}
            for path, name in names.items():
                explanation = explanation.replace(path, name)
            print("    " + explanation.replace("\n", "\n    "))
    print()
    for name in source.modules_read:
        module = source.module(name)
        print(f"{digest(module.text.encode())[:16]}  {os.path.relpath(module.path, os.path.dirname(source.location))}")
    _note("Send this text to the maintainers of te-graph-fixes.")
    return 0


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except Exception:  # The package is not installed, or its metadata is broken.
        return "-"


def _list(options: argparse.Namespace) -> int:
    """List all fixes with symptom, affected versions and upstream status.

    exit status: 0
    example: te-graph-fixes list
    """
    if options.json:
        print(json.dumps(texts.records(), indent=2))
    else:
        print(*texts.listing(), sep="\n")
    return 0


def _decision(options: argparse.Namespace, settings: Settings | None = None) -> Decision:
    """Return the decision for the TE in the options. If ``settings`` is None, read them from the environment."""
    settings = settings or _settings()  # before the source is read, so errors in the settings are reported first
    return decide(read(_source(options)), settings)


def _settings() -> Settings:
    """Return the settings from the environment, after printing a message for each unknown variable."""
    for text in unknown_variables():
        _note(text)
    return Settings.read()


def _source(options: argparse.Namespace) -> Source:
    return Source.installed() if options.source is None else Source.at(options.source)


def _where(options: argparse.Namespace) -> str:
    """Return `` --source DIR`` (with the leading space) for commands in a message, or "" for the installed TE."""
    return "" if options.source is None else f" --source {shlex.quote(options.source)}"


_parser = argparse.ArgumentParser(
    prog="te-graph-fixes",
    description="Fix the CUDA-graph bugs of the installed TransformerEngine (TE).",
    epilog=_EPILOG,
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
_parser.add_argument("--version", action="version", version=f"te-graph-fixes {__version__}")
_parser.set_defaults(source=None)
_commands = _parser.add_subparsers(required=True, metavar="COMMAND")
COMMANDS: dict[str, argparse.ArgumentParser] = _commands.choices


def _add(function: Callable[[argparse.Namespace], int], *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Register a function as a command, with the options of ``parents``, and return the command's parser."""
    title, _, details = str(inspect.getdoc(function)).partition("\n\n")
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
_of_te.add_argument("--source", metavar="DIR", help="a site-packages folder or checkout that contains TE")
_as_json = argparse.ArgumentParser(add_help=False)
_as_json.add_argument("--json", action="store_true", help="print JSON")

_add(_status, _of_te, _as_json).add_argument(
    "--all", action="store_true", help="also list the affected jobs, and the bugs that TE does not have"
)
_add(_explain).add_argument("fix", metavar="FIX")
_add(_diff, _of_te).add_argument("fixes", nargs="*", metavar="FIX", help="the fixes to print (default: all that apply)")
_of_bake = _add(_bake, _of_te)
_of_bake.add_argument("--force", action="store_true", help="with --undo: discard changes made after the bake")
_modes = _of_bake.add_mutually_exclusive_group()
_modes.add_argument("--check", action="store_true", help="change nothing, report whether every needed fix is baked")
_modes.add_argument("--undo", action="store_true", help="restore TE's files byte for byte")
_modes.add_argument("--overlay", metavar="DIR", help="write the files into DIR, to be mounted over TE's files")
# This parser is only for the help, because `__main__` starts `run`.
_commands.add_parser("run", help="Start a program with the fixes active in it and in its children")
_add(_issue, _of_te)
_add(_list, _as_json)
