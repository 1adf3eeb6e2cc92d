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
    """Simulate, in this process, the GPU named by ``TE_SIMULATOR_GPU`` and TE's C extension. Later calls do nothing.

    Uninitialized memory is filled with NaN, so a result that depends on such memory is visibly wrong. With
    ``TE_SIMULATOR_MEMORY="as found"``, torch's new tensors keep the content that their memory has, mostly zeros.
    """
    global _installed
    if _installed:
        return
    _installed = True
    # With this variable, which TE's own build sets, TE does not load its shared libraries.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"

    # Import dynamo before torch is changed, because dynamo lists torch's original functions at its import.
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
