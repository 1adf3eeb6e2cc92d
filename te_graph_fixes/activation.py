"""Apply the fixes when TransformerEngine (TE) has been imported, and revert them.

    activate()           reads the settings, and applies the fixes if TE is already imported
    import of TE ends    wrapt calls our hook, which applies the fixes selected by the current settings
    deactivate()         reverts the fixes

A fix that cannot be applied is skipped, together with the fixes that require it. Of the other fixes, either all are
installed or none. In strict mode, a missing fix is an error: no fix is installed, and the import of TE fails.
`decision` describes the steps from TE's source to the installed fixes. That module is imported only when needed, so
that ``import te_graph_fixes`` is fast.
"""

import _imp
import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

from .messages import FixNotAppliedError, TEGraphFixesWarning, print_status_line, problem_summary
from .patching import PACKAGE
from .ranks import is_first_on_host
from .settings import Settings, unknown_variables
from .status import FixStatus, Report, Status
from .support.warn_once import warn_once

if TYPE_CHECKING:
    from .decision import Decision
    from .manifest import Manifest
    from .patching.installation import Installation

_COPIED = "_make_graphed_callables"
"""A function of TransformerEngine's graph.py. Any other module that defines this function is a copy of graph.py."""
_NOT_LOADED = (
    "{} baked it into TransformerEngine's files, but this process runs other code. Either TransformerEngine was "
    "imported before the bake, or its bytecode is old (delete __pycache__ and the folder PYTHONPYCACHEPREFIX), or "
    "another package has replaced the code"
)


def require_wrapt() -> None:
    """Raise ImportError if wrapt is missing or too old."""
    advice = f"{sys.executable or 'python'} -m pip install 'wrapt>=1.16,<3'"
    try:
        import wrapt
    except ImportError as error:
        raise ImportError(f"te_graph_fixes needs wrapt, which is not installed. Run: {advice}", name="wrapt") from error
    version: str = wrapt.__version__  # type: ignore[attr-defined]
    if tuple(map(int, version.split(".")[:2])) < (1, 16):
        raise ImportError(f"te_graph_fixes needs wrapt 1.16 or later, found {version}. Run: {advice}", name="wrapt")


class _Activation:
    """The state of this process: the settings, the decision on TE, and the installed fixes.

    `_lock` guards this state. No code imports TE while it holds the lock.
    """

    def __init__(self) -> None:
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)
        self._is_watching = False
        self._settings: Settings | None = None
        self._decision: Decision | None = None
        self._installation: Installation | None = None
        self._failure = ""  # the reason why no fix is installed: an error, or strict mode
        self._reverted: frozenset[str] = frozenset()
        self._earlier_graphs: int | None = None  # the number of TE's graphs captured before any fix was applied
        self._copies: tuple[str, ...] = ()  # the names of modules that are copies of TE's graph.py

    def _renew_lock(self) -> None:
        """Create the lock. In a forked child, the thread that held the old lock may no longer exist."""
        self._lock = threading.RLock()

    def activate(
        self, only: Iterable[str] | None = None, disable: Iterable[str] | None = None, strict: bool | None = None
    ) -> None:
        """Apply the fixes now if TransformerEngine (TE) is imported, else when its import ends.

        Capture graphs after this call, because a graph always runs the code that it was captured with. If graphs were
        captured before the first activation, a warning (in strict mode, an error) reports their number.

        ``only`` (fix ids), ``disable`` (fix ids) and ``strict`` replace ``TE_GRAPH_FIXES``, ``TE_GRAPH_FIXES_DISABLE``
        and ``TE_GRAPH_FIXES_STRICT``. Selecting a fix also selects the fixes that it requires. Disabling a fix also
        disables the fixes that require it. A second call reverts the fixes and starts over with the new settings.

        Raise ValueError for an unknown id or value, and RuntimeError if this thread is importing TE. In strict mode,
        raise `FixNotAppliedError` if a needed fix cannot be applied. TE is then unchanged.
        """
        settings = Settings.read(only, disable, strict)
        try:
            if not settings.off:
                require_wrapt()
                for text in unknown_variables():
                    _warn(text)
            self._start(settings)
        except Exception:
            if not settings.off:  # turning the fixes off must always work
                raise
            print_status_line(self._report_if_off(), settings.verbose)

    def _start(self, settings: Settings) -> None:
        with self._lock:
            self._reset()
            self._settings, self._reverted = settings, frozenset()
            if not self._is_watching:
                self._is_watching = True
                self._watch()
        # Another thread may have started to import TE before the hook was registered. Wait until it has finished.
        importlib._bootstrap._lock_unlock_module(PACKAGE)  # type: ignore[attr-defined]
        if PACKAGE not in sys.modules:
            return
        if not loaded(PACKAGE):
            # If the error below ends the import of te_graph_fixes, the hook remains, but could not import `decision`.
            from . import decision  # noqa: F401

            raise RuntimeError(
                "The fixes cannot be applied while this thread is importing TransformerEngine. "
                "Import te_graph_fixes before TransformerEngine, or after it."
            )
        if self._decision is None:  # else the hook has already applied the fixes in another thread
            self._apply()

    def deactivate(self) -> None:
        """Revert every fix, and apply none if TE is imported later. Other packages' changes to TE's code remain."""
        with self._lock:
            if self._installation and self._decision:
                self._reverted |= frozenset(self._decision.to_apply)
            self._reset()
            self._settings = None
        from .manifest import UNDO, installed_manifest

        if manifest := installed_manifest():
            _warn(f"The fixes that {manifest.by} baked into TransformerEngine stay active until `{UNDO}`.")

    def _watch(self) -> None:
        """Register the hook with wrapt, which calls it at the end of TE's next import.

        If TE were in `sys.modules`, wrapt would call the hook immediately and not register it. TE is therefore removed
        from `sys.modules` during the registration. Meanwhile, Python's import lock prevents other threads from
        importing TE.
        """
        from wrapt import register_post_import_hook

        _imp.acquire_lock()
        try:
            module = sys.modules.pop(PACKAGE, None)
            register_post_import_hook(self._on_import, PACKAGE)
            if module is not None:
                sys.modules[PACKAGE] = module
        finally:
            _imp.release_lock()

    def _on_import(self, _: ModuleType) -> None:
        """Apply the fixes. wrapt calls a registered hook only once, so register it again for later imports of TE."""
        self._watch()
        try:
            self._apply()
        except FixNotAppliedError:
            # Python keeps the submodules of a package whose import fails. A later import would find them, unfixed.
            for name in [name for name in sys.modules if name.startswith(f"{PACKAGE}.")]:
                del sys.modules[name]
            raise

    def _apply(self) -> None:
        """Apply the fixes to the imported TE, print the status line, and warn of problems (in strict mode, raise)."""
        from .manifest import UNDO

        with contextlib.suppress(ImportError):  # `self.report` raises the error again, unless the fixes are off
            # Import `decision` before taking the lock. A child that is forked during an import waits forever if the
            # child imports the same module, because Python does not renew a module's import lock in a child.
            from .decision import settings_conflict

        with self._lock:
            settings = self._settings
            if settings is None:  # deactivated
                return
            self._reset()
            try:
                self._install(settings)
            except Exception as error:  # except in strict mode, no error of this package may break TE's import
                self._uninstall()
                self._failure = f"nothing was changed: {type(error).__name__}: {error}"
            report = self._report_if_off() if settings.off else self.report()
            decision, problems = self._decision, ""
            if not settings.off:
                conflict = (decision.outdated or settings_conflict(decision)) if decision else ""
                problems = "\n".join(filter(None, [conflict, problem_summary(report)]))
            if problems and settings.strict:
                self._uninstall()
                self._failure = "nothing was changed: strict mode raised an error"
                report = self.report()
        is_undone_by_bake = settings.off and report.mode == "baked"
        print_status_line(report, settings.verbose, f' undo="{UNDO}"' if is_undone_by_bake else "")
        if problems and settings.strict:
            raise FixNotAppliedError(problems)
        _warn(problems)
        if is_first_on_host() and not settings.off:
            _warn("\n".join(report.copy_warnings()))

    def _report_if_off(self) -> Report:
        """Return the report, or an empty report after an error, because turning the fixes off must always work."""
        with contextlib.suppress(Exception):
            return self.report()
        return Report(None, {}, mode="off")

    def _install(self, settings: Settings) -> None:
        from .decision import decide, read
        from .manifest import installed_manifest
        from .patching.installation import Installation
        from .patching.source import Source, TENotFoundError

        if settings.off and installed_manifest() is None:
            return
        if self._earlier_graphs is None:
            self._earlier_graphs = _captured_graphs()
        self._copies = _copies_of_graphs()
        try:
            source = Source.installed()
        except TENotFoundError as error:  # another package has replaced TE in `sys.modules`
            self._failure = str(error)
            return
        reading = read(source)
        self._decision = decide(reading, settings)
        installation = Installation(source, self._decision.to_apply)
        if failures := installation.failing_changes():  # for example because another package has replaced a function
            self._decision = decide(reading, settings, failures)
            installation = Installation(source, self._decision.to_apply)
        source.forget_modules()
        self._installation = installation
        installation.install()

    def _uninstall(self) -> None:
        if self._installation:
            self._installation.revert()
        self._installation = None

    def _reset(self) -> None:
        """Revert the fixes, and forget the decision."""
        self._uninstall()
        self._decision = None
        self._failure = ""

    def report(self) -> Report:
        """Return the status of every fix. A fix is reported as applied only if its code is active now."""
        from .decision import decide, read, state_digest
        from .fixes import CATALOGUE
        from .manifest import installed_manifest
        from .patching.source import Source, TENotFoundError

        with self._lock:
            decision, source, missing = self._decision, None, ""
            try:
                source = decision.source if decision else Source.installed()
            except TENotFoundError:
                missing = "TransformerEngine is not installed"
            if decision is None and source and installed_manifest():  # without a manifest, `read` is slow
                decision = decide(read(source), self._settings or Settings(frozenset()))
            manifest = decision.reading.manifest if decision else None
            is_loaded = self._decision is not None or loaded(PACKAGE)
            baked = _baked_statuses(decision, manifest, is_loaded) if decision and manifest else {}
            fixes = {}
            for fix in CATALOGUE.values():
                status, reason = baked.get(fix.id) or self._status_of(fix.id, missing)
                targets = decision.fixes[fix.id].targets if decision else ()
                graphs = (self._earlier_graphs or 0) if status == Status.APPLIED else 0
                fixes[fix.id] = FixStatus(status, reason, fix.upstream, targets, graphs)
            report = Report(source.version if source else None, fixes, copies=self._copies)
            texts = self._installation.texts if self._installation else []
            return replace(report, mode=self._mode(report), digest=state_digest(report, manifest, texts))

    def _mode(self, report: Report) -> str:
        """Return the `Report.mode` that follows from the statuses in ``report`` and from the settings."""
        statuses = {fix.status for fix in report.fixes.values()}
        if report.active:
            return "memory" if Status.APPLIED in statuses else "baked"
        if report.missing:
            return "failed"
        if self._settings is None or self._settings.off:
            return "off"
        return "pending" if Status.PENDING in statuses else "memory"

    def _status_of(self, fix_id: str, missing: str) -> tuple[Status, str]:
        """Return the status of a fix and the reason. ``missing`` is the reason if TE is not installed, else ""."""
        if self._settings is None:
            if fix_id in self._reverted:
                return Status.REVERTED, "reverted by deactivate()"
            return Status.DISABLED, "te_graph_fixes is not active"
        if self._settings.off:
            return Status.DISABLED, "disabled by the settings"
        decided = self._decision.fixes[fix_id] if self._decision else None
        if decided and decided.status != Status.PENDING:
            return decided.status, decided.reason
        if self._installation and decided:
            if self._installation.is_live(fix_id):
                return Status.APPLIED, decided.reason
            return Status.FAILED, "another package has replaced the fixed code"
        if self._failure:
            return Status.FAILED, self._failure
        if loaded(PACKAGE):
            return Status.FAILED, f"the import of {PACKAGE} was not noticed. Call te_graph_fixes.activate()"
        return Status.PENDING, missing or "TransformerEngine is not imported yet"


def _baked_statuses(decision: "Decision", manifest: "Manifest", is_loaded: bool) -> dict[str, tuple[Status, str]]:
    """Return the status and reason of every fix in a baked TE.

    A baked fix is pending until TE is imported, and failed if this process runs other code.
    """
    from .patching.installation import live_changes

    statuses = {fix_id: (fix.status, fix.reason) for fix_id, fix in decision.fixes.items()}
    live = live_changes(decision.source, manifest.functions) if is_loaded else ()
    for fix_id in decision.reading.in_bake(Status.APPLIED):
        if not is_loaded:
            reason = f"{statuses[fix_id][1]}. TransformerEngine is not imported yet"
            statuses[fix_id] = Status.PENDING, reason
        elif fix_id not in live:
            statuses[fix_id] = Status.FAILED, _NOT_LOADED.format(manifest.by)
    decision.source.forget_modules()
    return statuses


def _warn(text: str) -> None:
    if text:
        warn_once(text, category=TEGraphFixesWarning)


def loaded(name: str) -> bool:
    """Return whether a module is in `sys.modules` and its import has ended."""
    module = sys.modules.get(name)
    return module is not None and getattr(getattr(module, "__spec__", None), "_initializing", False) is not True


def _captured_graphs() -> int:
    """Return the number of graphed callables that TE has created. TE defines a subclass of `Function` for each."""
    function = getattr(getattr(sys.modules.get("torch"), "autograd", None), "Function", None)
    classes: list[type] = function.__subclasses__() if isinstance(function, type) else []
    return sum(function_class.__module__ == f"{PACKAGE}.graph" for function_class in classes)


def _copies_of_graphs() -> tuple[str, ...]:
    """Return the names of the imported copies of TE's graph.py (other modules that define `_COPIED`), or ()."""
    copies = []
    for name, module in list(sys.modules.items()):
        is_module = issubclass(type(module), ModuleType)
        own = object.__getattribute__(module, "__dict__") if is_module else {}  # `vars` could import a lazy module
        if name != f"{PACKAGE}.graph" and getattr(own.get(_COPIED), "__module__", None) == name:
            copies.append(name)
    return tuple(sorted(copies))


_activation = _Activation()
activate, deactivate, report = _activation.activate, _activation.deactivate, _activation.report
