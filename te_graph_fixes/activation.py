"""Apply the fixes as TransformerEngine (TE) is imported, and take them back.

A finder watches TE and the modules that the fixes change. What then happens:

    activate()                                    the settings are known, and the finder is in place
    TE is about to be executed                    TE is read: its source, the verdicts, what is chosen of them
    the last module that changes was executed     what is chosen is installed in one step, or nothing is
    deactivate(), activate(), a strict refusal    what was installed is taken back
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .importing import PACKAGE, Finder, loaded, runs_unchecked_bytecode
from .report import (
    FixNotAppliedError,
    FixStatus,
    Report,
    TEGraphFixesWarning,
    announce,
    copies_of_graphs,
    problem_summary,
)
from .settings import Settings, unknown_variables
from .shipped.warn_once import warn_once
from .status import Status

if TYPE_CHECKING:
    from .decision import Decision

_logger = logging.getLogger("te_graph_fixes")


def require_wrapt() -> None:
    """Raise ImportError where wrapt is missing. It is imported only with TE, because it is slow to import."""
    if importlib.util.find_spec("wrapt") is None:
        advice = f"{sys.executable} -m pip install 'wrapt>=1.16,<3'"
        raise ImportError(f"te_graph_fixes needs wrapt, which is not installed: {advice}", name="wrapt")


class _Activation:
    """The state of this process: the settings, the decision on TE, and whether that is installed.

    The lock is never held while TE is imported.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._finder = Finder(self.watches, self.before, self.after)
        self._settings: Settings | None = None
        self._early: Decision | None = None  # for the first time that TE is to be read
        self._decision: Decision | None = None
        self._failure = ""  # why nothing of the decision was put in place
        self._reverted: frozenset[str] = frozenset()
        self._earlier_graphs: int | None = None  # of TE, captured before any fix was in place
        self._copies: tuple[str, ...] = ()  # modules with a copy of TE's graphs, as TE was imported

    def activate(
        self, only: Iterable[str] | None = None, disable: Iterable[str] | None = None, strict: bool | None = None
    ) -> None:
        """Apply the fixes now if TransformerEngine (TE) is imported, else as it is imported.

        TE's graphs keep what they were captured with: capture them afterwards. Graphs that were captured before the
        first activation are counted in a warning (in strict mode, an error).

        ``only`` (fix ids), ``disable`` (fix ids) and ``strict`` replace what ``TE_GRAPH_FIXES``,
        ``TE_GRAPH_FIXES_DISABLE`` and ``TE_GRAPH_FIXES_STRICT`` say. Calling it again starts over with the new
        settings. Raises ValueError for an unknown id or value and for a fix that is named without one that it requires,
        and in strict mode `FixNotAppliedError` where a needed fix cannot be applied; TE is then as it was.
        """
        require_wrapt()
        settings, early = Settings.read(only, disable, strict), None
        for text in unknown_variables():
            warn_once(text, category=TEGraphFixesWarning)
        if settings.only is not None or settings.disable:
            from .decision import Decision, disagreement
            from .stamp import installed

            if settings.only:
                early = Decision.installed(settings)  # that a fix is named without one that it requires shows at once
            self._warn_or_raise(disagreement(settings, installed()), settings)
        with self._lock:
            self._stop()
            self._settings, self._early, self._reverted = settings, early, frozenset()
            if settings.off:
                return
            sys.meta_path.insert(0, self._finder)
        self._finder.wait()
        if PACKAGE in sys.modules:
            self.before(PACKAGE)
            self.after(PACKAGE if loaded(PACKAGE) else "", late=True)  # not yet loaded: it is TE that imports us

    def deactivate(self) -> None:
        """Take every fix back and stop watching for TransformerEngine. What others have wrapped or replaced stays."""
        with self._lock:
            if self._decision and self._decision.installation.is_in_place:
                self._reverted |= frozenset(self._decision.to_apply)
            self._stop()
        from .stamp import installed, undoing

        if corrected := installed():
            source, stamp = corrected
            warn_once(f"{undoing(source)}: deactivate() leaves all {len(stamp.made)} in", category=TEGraphFixesWarning)

    def active_settings(self) -> Settings:
        """Those of the last `activate`; after `deactivate`, that no fix is wanted."""
        return self._settings or Settings(only=frozenset())

    def watches(self, name: str) -> bool:
        """Whether ``name`` is where TE starts, or a module to be changed."""
        return name == PACKAGE or (self._decision is not None and name in self._decision.targets)

    def before(self, name: str) -> None:
        """``name`` is about to be executed: read TE, if this is its start."""
        settings = self._settings
        if settings is None or name != PACKAGE:
            return
        from .decision import Decision

        decision = Decision.installed(settings, self._early)
        with self._lock:
            if self._settings is settings:
                self._take_back()
                self._decision, self._early = decision, None
        if settings.strict and not loaded(PACKAGE):
            self._warn_or_raise(problem_summary(self.report()), settings)

    def after(self, name: str, late: bool = False) -> None:
        """``name`` has been executed: install what is chosen, if all that it changes has been.

        What is loaded ``late``, before TE's files were read, may be older than these.
        """
        with self._lock:
            decision = self._decision
            if decision is None or decision.installation.is_in_place or self._failure or self._waits(decision, name):
                return
            try:
                if self._earlier_graphs is None:
                    self._earlier_graphs = _captured_graphs()
                self._copies = copies_of_graphs(f"{PACKAGE}.graph")
                self._decision = decision.install(compare=late or runs_unchecked_bytecode(PACKAGE))
            except Exception as error:  # one of ours must not reach the import of TE
                _logger.debug("the installation failed", exc_info=True)
                self._failure = f"nothing was changed: {type(error).__name__}: {error}"
        report = self.report()
        self._warn_or_raise(problem_summary(report), decision.settings)
        announce(report, decision.settings.verbose)

    def _take_back(self) -> None:
        if self._decision:
            self._decision.installation.revert()
        self._failure = ""

    def _stop(self) -> None:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._take_back()
        self._settings = self._early = self._decision = None

    def _warn_or_raise(self, text: str, settings: Settings) -> None:
        """Warn of what the text says, if there is any; in strict mode raise it, with everything taken back."""
        if text and settings.strict:
            with self._lock:
                self._take_back()
                self._failure = "nothing was changed: strict mode has raised an error"
            raise FixNotAppliedError(text)
        if text:
            warn_once(text, category=TEGraphFixesWarning)

    def report(self) -> Report:
        """The status of every fix, read from the live objects."""
        from .decision import on_disk
        from .fixes import CATALOGUE
        from .patching.source import Source, TENotFoundError

        with self._lock:
            source, absent = self._decision.source if self._decision else None, ""
            try:
                source = source or Source.installed()
            except TENotFoundError:
                absent = "TransformerEngine is not installed"
            baked = on_disk(source) if source and not self._decision else None
            fixes = {}
            for fix in CATALOGUE.values():
                if baked:
                    state, reason = baked[fix.id].status, baked[fix.id].reason
                else:
                    state, reason = self._status(fix.id, absent)
                targets = self._decision.decisions[fix.id].targets if self._decision else ()
                graphs = (self._earlier_graphs or 0) if state == Status.APPLIED else 0
                fixes[fix.id] = FixStatus(state, reason, fix.upstream, targets, graphs)
            return Report(source.version if source else None, fixes, copies=self._copies)

    def _status(self, fix_id: str, absent: str) -> tuple[Status, str]:
        """The state of a fix, and the reason; ``absent`` says why there is no TE."""
        decision = self._decision
        if self._settings is None:
            if fix_id in self._reverted:
                return Status.REVERTED, "deactivate() took it back"
            return Status.DISABLED, "te_graph_fixes is not active"
        if decision:
            decided = decision.decisions[fix_id]
            state, reason = decided.status, decided.reason
            if state != Status.APPLICABLE:
                return state, reason
            if decision.installation.is_in_place:
                if decision.installation.is_live(fix_id):
                    return Status.APPLIED, f"corrected: {reason}"
                return Status.FAILED, "another package has replaced a corrected function"
        elif not self._settings.wants(fix_id):
            return Status.DISABLED, "left out by the settings"
        if self._failure:
            return Status.FAILED, self._failure
        if loaded(PACKAGE):
            return Status.FAILED, f"{PACKAGE} was imported past te_graph_fixes; call te_graph_fixes.activate()"
        return Status.PENDING, absent or "TransformerEngine is not imported yet"

    def _waits(self, decision: Decision, executed: str) -> bool:
        """Whether a module that changes is yet to be executed."""
        edited = {edit.module for verdict in decision.to_apply.values() for edit in verdict.edits}
        return executed != PACKAGE and not all(name == executed or loaded(name) for name in edited)


def _captured_graphs() -> int:
    """How many graphs of TE there are: for each it makes a class of autograd functions."""
    function = getattr(getattr(sys.modules.get("torch"), "autograd", None), "Function", None)
    classes: list[type] = function.__subclasses__() if isinstance(function, type) else []
    return sum(function_class.__module__ == f"{PACKAGE}.graph" for function_class in classes)


_activation = _Activation()
activate, deactivate, report = _activation.activate, _activation.deactivate, _activation.report
active_settings = _activation.active_settings
