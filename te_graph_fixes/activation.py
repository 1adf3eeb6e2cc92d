"""Apply the fixes as TransformerEngine (TE) is imported, and take them back.

A finder watches TE and the modules that the fixes change. What then happens:

    activate()                                    the settings are known, and the finder is in place
    TE is about to be executed, or one of the
      watched modules is about to be reloaded     TE is read: its source, the verdicts, what is chosen of them
    the last module that changes was executed     what is chosen is installed in one step, or nothing is
    a reload, deactivate(), activate(), a strict
      refusal                                     what was installed is taken back
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Iterable
from types import FunctionType
from typing import TYPE_CHECKING
from weakref import WeakSet

from .captured import Captured
from .finder import PACKAGE, Finder, loaded
from .messages import announce, complaint, warn
from .settings import EXPECT, Settings
from .status import FixNotAppliedError, FixStatus, Report

if TYPE_CHECKING:
    from .verdicts import Reading

if importlib.util.find_spec("wrapt") is None:  # `loader` imports it, and only with TE: it is slow to import
    raise ImportError("te_graph_fixes needs wrapt, which is not installed: pip install 'wrapt>=1.16,<3'", name="wrapt")

_logger = logging.getLogger("te_graph_fixes")


class _Activation:
    """The state of this process: what is wanted, what is known and chosen, what is installed.

    The lock is never held while TE is imported.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._finder = Finder(self.watches, self.before, self.after)
        self._settings: Settings | None = None
        self._early: Reading | None = None  # for the first time that TE is to be read
        self._reading: Reading | None = None
        self._failure: str | None = None  # "": what is chosen of it is installed; None: it is not yet to be
        self._reverted: frozenset[str] = frozenset()
        self._earlier: WeakSet[FunctionType] = WeakSet()
        self._captured = Captured()

    def activate(
        self, only: Iterable[str] | None = None, disable: Iterable[str] | None = None, strict: bool | None = None
    ) -> None:
        """Apply the fixes now if TransformerEngine (TE) is imported, else as it is imported.

        TE's graphs keep what they were captured with: capture them afterwards. Graphs of this process that were
        captured before are counted in a warning (in strict mode, an error).

        ``only`` (fix ids), ``disable`` (fix ids) and ``strict`` replace what ``TE_GRAPH_FIXES``,
        ``TE_GRAPH_FIXES_DISABLE`` and ``TE_GRAPH_FIXES_STRICT`` say. Calling it again starts over with the new
        settings. Raises ValueError for an unknown id or value and for a fix that is named without one that it requires,
        and in strict mode `FixNotAppliedError` where a needed fix cannot be applied; TE is then as it was.
        """
        settings, early = Settings.read(only, disable, strict), None
        if settings.only:
            from .verdicts import Reading

            early = Reading.installed(settings)  # that a fix is named without one that it requires shows at once
        with self._lock:
            self._stop()
            self._settings, self._early, self._reverted = settings, early, frozenset()
            if settings.off:
                return
            sys.meta_path.insert(0, self._finder)
        self._finder.wait()
        if PACKAGE in sys.modules:
            self.before(PACKAGE)
            self.after(PACKAGE if loaded(PACKAGE) else "")  # not yet loaded: it is TE that is importing us

    def deactivate(self) -> None:
        """Take every fix back and stop watching for TransformerEngine. What others have wrapped or replaced stays."""
        with self._lock:
            self._reverted |= self._applied
            self._stop()

    def watches(self, name: str) -> bool:
        """Whether ``name`` is where TE starts, or a module to be changed, or one to be reloaded that the fixes read."""
        reading = self._reading
        if reading is None or name == PACKAGE:
            return name == PACKAGE
        return name in (reading.modules if loaded(name) else reading.targets)

    def before(self, name: str) -> None:
        """``name`` is about to be executed: read TE, if this is its start or a reload of a part of it."""
        settings = self._settings
        if settings is None or (name != PACKAGE and not loaded(PACKAGE)):
            return
        from .verdicts import Reading, mismatch

        reading = Reading.installed(settings, self._early)
        with self._lock:
            if self._settings is settings:
                self._take_back()
                self._reading, self._early = reading, None
        self._object(mismatch(reading, os.environ.get(EXPECT, "")), settings.strict)
        if settings.strict and not loaded(PACKAGE):
            self._complain(self.report(), settings)

    def after(self, name: str) -> None:
        """``name`` has been executed: install what is chosen, if all that it changes has been."""
        with self._lock:
            reading, settings = self._reading, self._settings
            if reading is None or settings is None or self._failure is not None or self._waits(reading, name):
                return
            try:
                reading.require_live()
                self._captured.note(frozenset())
                reading.installation.install(self._earlier)
                self._failure = ""
            except Exception as error:
                _logger.debug("the installation failed", exc_info=True)
                self._failure = f"nothing was changed: {type(error).__name__}: {error}"
        report = self.report()
        self._complain(report, settings)
        announce(report, settings.verbose)

    @property
    def _applied(self) -> frozenset[str]:
        return frozenset(self._reading.to_apply if self._reading and self._failure == "" else ())

    def _take_back(self) -> None:
        if self._reading and self._failure == "":
            self._captured.note(self._applied)
            self._earlier.update(self._reading.installation.revert())
        self._failure = None

    def _stop(self) -> None:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._take_back()
        self._settings = self._early = self._reading = None

    def _complain(self, report: Report, settings: Settings) -> None:
        """Object where a graph is without a fix that it needs."""
        advice = ". To go on without a fix, name it in TE_GRAPH_FIXES_DISABLE or unset TE_GRAPH_FIXES_STRICT"
        with self._lock:
            text = complaint(report, self._captured.without(self._applied))
        self._object(text and text + (advice if settings.strict else "; see te_graph_fixes.report()"), settings.strict)

    def _object(self, text: str, strict: bool) -> None:
        """Warn of what the text says, if there is any; in strict mode raise it, with everything taken back."""
        if text and strict:
            with self._lock:
                self._take_back()
                self._failure = "nothing was changed: strict mode has raised an error"
            raise FixNotAppliedError(text)
        if text:
            warn(text)

    def report(self) -> Report:
        """The status of every fix, read from the live objects."""
        from .fixes import CATALOGUE
        from .source import Source, TENotFoundError

        with self._lock:
            try:
                version, absent = (self._reading or Source.installed()).version, ""
            except TENotFoundError:
                version, absent = None, "TransformerEngine is not installed"
            targets = {fix_id: found.targets for fix_id, found in self._reading.chosen.items()} if self._reading else {}
            fixes = {
                fix.id: FixStatus(*self._status(fix.id, absent), fix.upstream, targets.get(fix.id, ()))
                for fix in CATALOGUE.values()
            }
            return Report(version, fixes)

    def _status(self, fix_id: str, absent: str) -> tuple[str, str]:
        """Status of a fix, and the reason."""
        reading = self._reading
        if self._settings is None:
            taken_back = "reverted", "deactivate() took it back"
            return taken_back if fix_id in self._reverted else ("disabled", "te_graph_fixes is not active")
        if reading is None and not self._settings.wants(fix_id):
            return "disabled", "left out by the settings"
        word, reason = (reading.chosen[fix_id].verdict, reading.reason(fix_id)) if reading else ("applicable", "")
        if word in ("disabled", "unrecognized") or (word != "applicable" and self._failure != ""):
            return word, reason
        if reading is None or self._failure is None:
            past = "failed", f"{PACKAGE} was imported past te_graph_fixes; call te_graph_fixes.activate()"
            return past if loaded(PACKAGE) else ("pending", absent or "TransformerEngine is not imported yet")
        live = not self._failure and reading.installation.is_live(fix_id)
        if word != "applicable":
            replaced = "unrecognized", "somebody has replaced a function that its source has as it should be"
            return (word, reason) if live else replaced
        if not live:
            return "failed", self._failure or "somebody has replaced what it had put in place"
        early = self._captured.without({fix_id})
        return "applied", f"{reason}; {early} graphs that were captured before are without it" if early else reason

    def _waits(self, reading: Reading, executed: str) -> bool:
        """Whether there is more to be executed; where nothing is to be changed, all of TE is waited for."""
        edited = {edit.module for verdict in reading.to_apply.values() for edit in verdict.edits}
        absent = [name for name in edited if name != executed and not loaded(name)]
        return executed != PACKAGE and bool(absent or (executed and not edited))


_activation = _Activation()
activate, deactivate, report = _activation.activate, _activation.deactivate, _activation.report
