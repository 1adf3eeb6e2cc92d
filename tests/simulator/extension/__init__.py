"""A stand-in for TE's C extension ``transformer_engine_torch``, with the functions that TE's linear modules call.

Like TE's functions, the functions here allocate their results and launch a kernel. The kernels compute on the CPU. They
round FP8 values as torch's float8 types do. Matrix products are summed in float64, so the order of summation does not
matter, and a replay is bit-identical to the eager run. Any other name can be imported and read, but calling it raises
NotImplementedError.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import itertools
import sys
from types import ModuleType

from . import activation, blocks, enums, gemm, general, grouped, normalization, optimizer, quantize

MODULE = "transformer_engine_torch"
_PARTS = (activation, blocks, enums, gemm, general, grouped, normalization, optimizer, quantize)


def install():
    """Install the stand-in under the name of TE's extension, and stop TE from searching for the real extension."""
    module = ModuleType(MODULE, __doc__)
    for part in _PARTS:
        for name in part.__all__:
            setattr(module, name, getattr(part, name))
    module.__getattr__ = _missing_from(module)
    sys.modules[MODULE] = module
    common = sys.modules.get("transformer_engine.common")
    if common is not None:
        raise RuntimeError("tests.simulator.install() must be called before transformer_engine is imported")
    sys.meta_path.insert(0, _CommonFinder())


def _missing_from(module):
    def look_up(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(name, (), {})

    return look_up


class _Missing(type):
    """The type of names that this stand-in lacks. Annotations may contain such a name, but a call raises an error."""

    _numbers = itertools.count(1000)

    def __init__(cls, *args):
        super().__init__(*args)
        cls._number = next(_Missing._numbers)
        cls.__members__: dict[str, _Missing] = {}  # if the name is an enumeration, its values that TE has read

    def __int__(cls):
        return cls._number

    def __call__(cls, *args, **kwargs):
        raise NotImplementedError(f"{MODULE}.{cls.__name__} is not implemented by the simulator")

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        member = _Missing(f"{cls.__name__}.{name}", (), {})
        cls.__members__[name] = member
        setattr(cls, name, member)
        return member


class _CommonFinder(importlib.abc.MetaPathFinder):
    """An import finder that replaces ``load_framework_extension`` in ``transformer_engine.common`` after its import."""

    def find_spec(self, fullname, path, target=None):
        if fullname != "transformer_engine.common":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                module.load_framework_extension = lambda framework: None

            spec.loader.exec_module = exec_module
        return spec
