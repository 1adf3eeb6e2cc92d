"""The finder at the front of `sys.meta_path` that sees TransformerEngine (TE) being imported, and its loader."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

TE = "transformer_engine"
PACKAGE = f"{TE}.pytorch"


class Finder:
    """Finds the modules that it ``watches`` as the other finders do, and puts one around their loader.

    ``before`` and ``after`` are called with the name of a module around its execution.
    """

    def __init__(
        self, watches: Callable[[str], bool], before: Callable[[str], None], after: Callable[[str], None]
    ) -> None:
        self._watches, self._before, self._after = watches, before, after
        self._local = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if getattr(self._local, "waiting", False) and name in (TE, PACKAGE):
            raise ModuleNotFoundError(f"no other thread imports {name}", name=name)
        if not self._watches(name) or getattr(self._local, "busy", False):
            return None
        self._local.busy = True
        try:
            finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
            spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        finally:
            self._local.busy = False
        if spec and hasattr(spec.loader, "exec_module"):
            spec.loader = _watched(spec.loader, self._before, self._after)
        return spec

    def wait(self) -> None:
        """Wait while another thread imports TE: it may be past this finder, and TE not yet in `sys.modules`.

        Who imports a module waits for the thread that does so already; if there is none, this finder is asked for it.
        """
        self._local.waiting = True
        try:
            with contextlib.suppress(ImportError):
                importlib.import_module(PACKAGE)
        finally:
            self._local.waiting = False


def _watched(loader: Any, before: Callable[[str], None], after: Callable[[str], None]) -> Any:
    """The same loader, which in addition calls ``before`` and ``after`` around the execution of a module."""
    import wrapt  # slow to import

    version: str = wrapt.__version__  # type: ignore[attr-defined]
    if tuple(map(int, version.split(".")[:2])) < (1, 16):
        # Not an ImportError: TE takes one to mean that there is no torch, and goes on without its layers.
        raise RuntimeError(f"te_graph_fixes needs wrapt 1.16 or later, found {version}: pip install 'wrapt>=1.16,<3'")

    class Loader(wrapt.ObjectProxy):  # type: ignore[type-arg]
        def exec_module(self, module: ModuleType) -> None:
            module.__loader__ = loader
            if module.__spec__ is not None:
                module.__spec__.loader = loader
            before(module.__name__)
            loader.exec_module(module)
            after(module.__name__)

    return Loader(loader)


def loaded(name: str) -> bool:
    """Whether a module is imported, to its end."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def runs_unchecked_bytecode(package: str) -> bool:
    """Whether a module of this package was imported from bytecode that Python does not compare with its source."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__cached__", None) if name.startswith(f"{package}.") else None
        with contextlib.suppress(OSError):
            if path and Path(path).read_bytes()[4:8] == b"\1\0\0\0":  # PEP 552
                return True
    return False
