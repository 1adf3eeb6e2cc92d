"""Apply the fixes as TransformerEngine (TE) is imported, and take them back.

A finder at the front of `sys.meta_path` watches the modules that the fixes change. After each of them has been
executed, and once all of them have been, the fixes are put in place in one step. The finder stays, so that a module
that is reloaded, and an import of TE that failed and is tried again, are corrected too.
"""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from .settings import EXPECT, Settings
from .status import FixNotAppliedError, FixStatus, Report, TEGraphFixesWarning

if TYPE_CHECKING:
    from .engine import Installation
    from .fix import Verdict
    from .source import Source

if importlib.util.find_spec("wrapt") is None:  # `loader` imports it, and only with TE: it is slow to import
    raise ImportError("te_graph_fixes needs wrapt, which is not installed: pip install 'wrapt>=1.16,<3'", name="wrapt")

PACKAGE = "transformer_engine.pytorch"
_logger = logging.getLogger("te_graph_fixes")


class _Finder:
    """Finds the watched modules as the other finders do, and puts a `Loader` around their loader."""

    def __init__(self) -> None:
        self._local = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _activation.watches(name) or getattr(self._local, "busy", False):
            return None
        from .loader import Loader

        self._local.busy = True
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                spec = find(name, path, target) if find and finder is not self else None
                if spec is not None:
                    if hasattr(spec.loader, "exec_module"):
                        spec.loader = Loader(spec.loader, _activation.before, _activation.after)
                    return cast("importlib.machinery.ModuleSpec", spec)
            return None
        finally:
            self._local.busy = False


class _Activation:
    """The state of this process. Its lock is never held while TE is imported."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._finder = _Finder()
        self._settings: Settings | None = None
        self._source: Source | None = None
        self._found: dict[str, Verdict] = {}
        self._statuses: dict[str, FixStatus] = {}
        self._targets: frozenset[str] = frozenset()
        self._installation: Installation | None = None
        self._earlier: WeakKeyDictionary[FunctionType, tuple[str, str]] = WeakKeyDictionary()
        self._said: set[str] = set()

    def activate(self, settings: Settings) -> None:
        with self._lock:
            self._take_back()
            self._settings, self._statuses = settings, {}
            if settings.off:
                return
            sys.meta_path.insert(0, self._finder)
        # Another thread may be importing it: past our finder already, and not in sys.modules yet.
        importlib._bootstrap._lock_unlock_module(PACKAGE)  # type: ignore[attr-defined]
        if PACKAGE in sys.modules:
            with _without_collection():
                self.before(PACKAGE)
                self.after(PACKAGE if _loaded(PACKAGE) else "")  # not yet loaded: it is TE that is importing us

    def deactivate(self) -> None:
        with self._lock:
            self._take_back()
            self._statuses = {
                fix_id: replace(status, status="reverted", reason="deactivate() took it back")
                for fix_id, status in self._statuses.items()
                if status.status == "applied"
            }

    def watches(self, name: str) -> bool:
        return name == PACKAGE or name in self._targets

    def before(self, name: str) -> None:
        """``name`` is about to be executed: if it is the package, read TE's source; in strict mode refuse at once."""
        if name == PACKAGE:
            with _without_collection():
                self._examine()
            self._compare()
            self._complain()

    def after(self, name: str) -> None:
        """``name`` has been executed: install if that was the last target, or again if a target was reloaded."""
        with self._lock:
            if self._source is None:
                return
            if self._installation is not None and not self._installation.is_live():
                self._earlier.update(self._installation.revert())
                self._installation = None
                self._choose()
            if self._installation is None:
                with _without_collection():
                    self._install(name)
        self._complain()
        if name == PACKAGE:
            self._announce()

    def report(self) -> Report:
        from .fixes import CATALOGUE
        from .source import Source, TENotFoundError
        from .verdicts import surprise

        try:
            version, where = (self._source or Source.installed()).version, "not imported yet"
        except TENotFoundError:
            version, where = None, "not installed"
        with self._lock:
            statuses = {}
            for fix in CATALOGUE.values():
                if self._settings is None:
                    status = FixStatus("disabled", "te_graph_fixes is not active", fix.upstream, ())
                elif not self._settings.wants(fix.id):
                    status = FixStatus("disabled", "left out by the settings", fix.upstream, ())
                else:
                    status = FixStatus("pending", f"TransformerEngine is {where}", fix.upstream, ())
                status = self._statuses.get(fix.id, status)
                if status.status == "applied" and not (
                    self._installation is not None and self._installation.is_live(fix.id)
                ):
                    status = replace(status, status="failed", reason="somebody has replaced what it had put in place")
                if fix.id in self._found and status.status not in ("disabled", "failed"):
                    unexpected = surprise(fix, self._found[fix.id], version)
                    status = replace(status, reason="; ".join(filter(None, [status.reason, unexpected])))
                statuses[fix.id] = status
            return Report(version, statuses)

    def _take_back(self) -> None:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        if self._installation is not None:
            self._earlier.update(self._installation.revert())
        self._installation = self._source = self._settings = None
        self._found, self._targets = {}, frozenset()

    def _examine(self) -> None:
        from .fix import UNRECOGNIZED, Verdict
        from .fixes import CATALOGUE
        from .source import Source, TENotFoundError
        from .verdicts import verdicts

        try:
            source = Source.installed()
            found = verdicts(source)
        except TENotFoundError as error:
            source = Source("", None)
            found = {fix_id: Verdict(UNRECOGNIZED, str(error)) for fix_id in CATALOGUE}
        with self._lock:
            if self._source is None and self._settings is not None:
                self._source, self._found = source, found
                self._choose()

    def _choose(self) -> None:
        """Give every fix its first status: of those that can be applied, what the settings and requirements leave."""
        from .fix import APPLICABLE
        from .fixes import CATALOGUE

        for fix in CATALOGUE.values():
            verdict = self._found[fix.id]
            if self._settings is None or not self._settings.wants(fix.id):
                status, reason = "disabled", f"left out by the settings; the source says {verdict.verdict}"
            else:
                status = "pending" if verdict.verdict == APPLICABLE else verdict.verdict
                reason = verdict.reason
            self._statuses[fix.id] = FixStatus(status, reason, fix.upstream, verdict.targets)
        self._drop_unmet()
        self._targets = frozenset(target for verdict in self._chosen().values() for target in verdict.targets)

    @property
    def _version(self) -> str | None:
        return self._source.version if self._source else None

    def _chosen(self) -> dict[str, Verdict]:
        return {
            fix_id: self._found[fix_id]
            for fix_id, status in self._statuses.items()
            if status.status in ("pending", "applied")
        }

    def _set(self, fix_id: str, status: str, reason: str) -> None:
        self._statuses[fix_id] = replace(self._statuses[fix_id], status=status, reason=reason)

    def _drop_unmet(self) -> None:
        """Leave out what requires a fix that is left out itself."""
        from .fixes import CATALOGUE
        from .verdicts import unmet

        while True:
            chosen = self._chosen()
            missing = {fix_id: unmet(CATALOGUE[fix_id], chosen, self._found) for fix_id in chosen}
            dropped = {fix_id: required for fix_id, required in missing.items() if required}
            if not dropped:
                return
            for fix_id, required in dropped.items():
                why = self._statuses[required].status
                self._set(fix_id, why, f"it requires {required}, which is {why}: one without the other is wrong")

    def _install(self, executed: str) -> None:
        """Install what is chosen once all its targets are loaded; give what cannot be installed its status."""
        from .engine import Installation

        assert self._source is not None
        try:
            while chosen := self._chosen():
                edited = {edit.module for verdict in chosen.values() for edit in verdict.edits}
                waiting = {name for name in edited if name != executed and not _loaded(name)}
                if waiting and executed != PACKAGE:
                    return
                installation = Installation(self._source, chosen, self._earlier)
                refused = {
                    fix_id: f"{PACKAGE} did not import {', '.join(sorted(waiting))}"
                    for fix_id, verdict in chosen.items()
                    if waiting & set(verdict.targets)
                } or installation.replaced()
                if not refused:
                    installation.install()
                    self._installation = installation
                    self._source.forget_trees()
                    for fix_id in chosen:
                        self._set(fix_id, "applied", self._statuses[fix_id].reason)
                    return
                for fix_id, reason in refused.items():
                    self._set(fix_id, "unrecognized", reason)
                self._drop_unmet()
        except Exception as error:
            _logger.debug("the installation failed", exc_info=True)
            for fix_id in self._chosen():
                self._set(fix_id, "failed", f"nothing was changed: {type(error).__name__}: {error}")

    def _complain(self) -> None:
        """Raise in strict mode, else warn once a process, where a wanted fix can neither be applied nor left out."""
        with self._lock:
            problems = [
                f"{fix_id} cannot be applied: {status.reason}"
                for fix_id, status in self._statuses.items()
                if status.status in ("unrecognized", "failed")
            ]
            text = f"TransformerEngine {self._version or '(unknown version)'}: {'; '.join(problems)}"
            if not problems:
                return
            if self._settings is not None and self._settings.strict:
                if self._installation is not None:
                    self._installation.revert()
                raise FixNotAppliedError(
                    f"{text}. Its graphs may give wrong gradients. To go on without a fix, name it in "
                    "TE_GRAPH_FIXES_DISABLE or unset TE_GRAPH_FIXES_STRICT"
                )
        if text in self._said:
            return
        message = f"{text}. Its graphs may give wrong gradients; see `te-graph-fixes status`"
        _logger.error("%s", message)
        warnings.warn(message, TEGraphFixesWarning, stacklevel=2)
        self._said.add(text)

    def _compare(self) -> None:
        """Warn once a process where TE's verdicts are not those that `te-graph-fixes run --print-env` found."""
        from .verdicts import fingerprint

        expected = os.environ.get(EXPECT)
        if not expected or EXPECT in self._said:
            return
        found = fingerprint(self._version, self._found)
        if found != expected:
            theirs, ours = (
                ", ".join(sorted(set(a.split(",")) - set(b.split(",")))) or "nothing more"
                for a, b in ((expected, found), (found, expected))
            )
            message = f"TransformerEngine here is not that of the other processes: {EXPECT} has {theirs}; found {ours}"
            _logger.warning("%s", message)
            warnings.warn(message, TEGraphFixesWarning, stacklevel=2)
        self._said.add(EXPECT)

    def _announce(self) -> None:
        """One INFO line a process, on rank 0."""
        groups: dict[str, list[str]] = {}
        for fix_id, status in self._statuses.items():
            groups.setdefault(status.status, []).append(fix_id)
        text = f"TransformerEngine {self._version or '(unknown version)'}: " + "; ".join(
            f"{status}: {', '.join(ids)}" for status, ids in sorted(groups.items())
        )
        if text not in self._said and os.environ.get("RANK", "0") == "0":
            self._said.add(text)
            _logger.info("%s", text)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Hold garbage collection off: next to torch's objects it takes longer than reading TE's source does."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _initializing(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _loaded(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not _initializing(module)


_activation = _Activation()


def activate(
    only: Iterable[str] | None = None, disable: Iterable[str] | None = None, strict: bool | None = None
) -> None:
    """Apply the fixes now if TransformerEngine (TE) is imported, else as it is imported.

    ``only`` (fix ids), ``disable`` (fix ids) and ``strict`` replace what ``TE_GRAPH_FIXES``,
    ``TE_GRAPH_FIXES_DISABLE`` and ``TE_GRAPH_FIXES_STRICT`` say. Calling it again starts over with the new settings.
    Raises ValueError for an unknown id or value, and in strict mode `FixNotAppliedError` where a needed fix cannot be
    applied; TE is then as it was.
    """
    _activation.activate(Settings.read(only, disable, strict))


def deactivate() -> None:
    """Take every fix back and stop watching for TransformerEngine. What others have wrapped or replaced stays."""
    _activation.deactivate()


def report() -> Report:
    """The status of every fix, read from the live objects."""
    return _activation.report()
