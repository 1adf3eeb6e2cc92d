"""The loader that is put around the loader of a watched module. Only this module imports wrapt."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import wrapt

_version: str = wrapt.__version__  # type: ignore[attr-defined]
if tuple(map(int, _version.split(".")[:2])) < (1, 16):
    # Not an ImportError: TransformerEngine takes one to mean that there is no torch, and goes on without its layers.
    raise RuntimeError(f"te_graph_fixes needs wrapt 1.16 or later, found {_version}: pip install 'wrapt>=1.16,<3'")


class Loader(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A module's own loader, which in addition calls ``before`` and ``after`` around the module's execution."""

    def __init__(self, loader: object, before: Callable[[str], None], after: Callable[[str], None]) -> None:
        super().__init__(loader)
        self._self_before, self._self_after = before, after

    def exec_module(self, module: ModuleType) -> None:
        loader = self.__wrapped__
        module.__loader__ = loader
        if module.__spec__ is not None:
            module.__spec__.loader = loader
        self._self_before(module.__name__)
        loader.exec_module(module)
        self._self_after(module.__name__)
