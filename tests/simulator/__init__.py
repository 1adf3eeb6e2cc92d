"""Run TransformerEngine's own Python, CUDA graphs included, on a machine without a GPU.

Call :func:`install` before the first import of TransformerEngine (TE), or start a program with
``python -m tests.simulator SCRIPT.py ARGS`` or ``python -m tests.simulator -m MODULE ARGS``. README.md in this folder
describes the simulated parts.
"""

from __future__ import annotations

import importlib
import os

__all__ = ["install", "installed"]

_installed = False


def install() -> None:
    """Simulate, in this process, a built TE and the GPU named by ``TE_SIMULATOR_GPU``. Later calls do nothing.

    New memory is full of NaN, so that no result can depend on it. With ``TE_SIMULATOR_MEMORY=as found``, its values are
    those of torch's new CPU memory, mostly zeros.
    """
    global _installed
    if _installed:
        return
    _installed = True
    # TE looks for its shared libraries unless it believes that it is being built.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"

    # TE imports dynamo. dynamo lists torch's functions at its import, so it must see the original functions.
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
    """Return whether `install` has run in this process."""
    return _installed
