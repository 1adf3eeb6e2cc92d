"""Run TransformerEngine's own Python, CUDA graphs included, on a machine without a GPU.

Call :func:`install` before anything of TransformerEngine (TE) is imported, or start a program with
``python -m tests.simulator SCRIPT.py ARGS`` or ``python -m tests.simulator -m MODULE ARGS``. See README.md in this
folder for what is simulated.
"""

from __future__ import annotations

import importlib
import os

__all__ = ["install", "installed"]

_installed = False


def install() -> None:
    """Make this process behave as with a built TE and one GPU, the one in ``TE_SIMULATOR_GPU``. Later calls do nothing.

    New memory is full of NaN, so that no result can depend on it. With ``TE_SIMULATOR_MEMORY=as found``, it has what
    torch leaves in it, mostly zeros.
    """
    global _installed
    if _installed:
        return
    _installed = True
    # TE looks for its shared libraries unless it believes that it is being built.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"

    # dynamo, which TE imports, lists torch's functions once; it must see torch's own.
    importlib.import_module("torch._dynamo")
    from . import device, extension, runtime

    device.install()
    runtime.install()
    extension.install()
    if os.environ.get("TE_SIMULATOR_MEMORY") != "as found":
        torch = importlib.import_module("torch")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True


def installed() -> bool:
    """Return whether this process simulates."""
    return _installed
