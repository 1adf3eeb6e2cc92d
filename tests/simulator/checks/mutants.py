"""Mutants of the simulator: its code with one edit, in memory, which the checks of ``blocks.py`` have to notice.

``python -m tests.simulator -m tests.simulator.checks.mutants`` prints one JSON line for each: the first check that
fails with it, null if none does, as without a mutant (the first line). Each runs in a fork, where the simulator's
functions get the code of the edited ones.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

MUTANTS = {
    "E8M0 exponents are one too large": ("formats", "(exponent + up.int())", "(exponent + up.int() + 1)"),
    "E8M0 exponents are rounded down": ("formats", "(exponent + up.int())", "exponent"),
    "halves are rounded up": ("formats", "quotient.round()", "torch.floor(quotient + 0.5)"),
    "nothing is rounded at random": ("formats", " if random is None else torch.floor(quotient + random)", ""),
    "rounding at random leans upwards": ("formats", "quotient + random", "quotient + random**0.5"),
    "the two codes of a byte are exchanged": (
        "formats",
        "codes[:, ::2] | codes[:, 1::2] << 4, scale",
        "codes[:, 1::2] | codes[:, ::2] << 4, scale",
    ),
    "no scale of the tensor": ("formats", ".to(to) * amax.view(-1, 1).to(to)", ".to(to)"),
    "the scale of the tensor is that of E4M3": ("formats", "limit * LARGEST_E2M1).div", "limit).div"),
    "4over6 takes the larger error": ("formats", "scale_of_4) < error_of", "scale_of_4) > error_of"),
    "4over6 prefers 4": ("formats", "scale_of_4) < error_of", "scale_of_4) <= error_of"),
    "4over6 maps to 3": ("formats", "scale * 1.5", "scale * 2.0"),
    "4over6 chooses for each row of a square block": ("formats", "while rows.shape[1] > 1", "while False"),
    "4over6 knows one kind of error": ("formats", "if error.squares else (found - wanted).abs()", ""),
    "4over6 compares values where it is told not to": ("formats", "if error.scaled", "if False"),
    "4over6 keeps the scale of 6": ("formats", "torch.where(smaller, scale_of_4, chosen)", "chosen"),
    "4over6 keeps the usual limit": (
        "blocks",
        'getattr(tensor, "_nvfp4_e4m3_max", formats',
        'getattr(tensor, "", formats',
    ),
    "4over6 is decoded with the usual limit": ("formats", "1 / (LARGEST_E2M1 * limit)", "1 / (LARGEST_E2M1 * 448)"),
    "row-scaled tensors have one scale": ("blocks", "dims = (1,) if part.amax.numel() > 1 else", "dims ="),
    "row-scaled tensors are not marked": ("blocks", 'names = ("row_scaled_nvfp4", ', 'names = ("", '),
    "existing tensors that become row-scaled keep their one scale": (
        "blocks",
        'name.startswith("amax") and has',
        "False and has",
    ),
    "scales of blocks as in the other versions": ("formats", '"fake_dtype" not in', '"fake_dtype" in'),
    "the scale of the wrong block": ("formats", "power_of_two(scale).to", "power_of_two(scale).roll(1, 1).to"),
    "scales that are no powers of two": ("formats", "if power_of_two_scales:", "if not power_of_two_scales:"),
    "tiles of scales in the other order": ("formats", "wide // 4, 4).permute(0, 3,", "wide // 4, 4).permute(3, 0,"),
    "scales are swizzled twice": (
        "blocks",
        "formats.swizzle(padded).view",
        "formats.swizzle(formats.swizzle(padded)).view",
    ),
    "swizzled scales are read as plain ones": ("blocks", "formats.unswizzle(self.scale.view(scale.shape))", "scale"),
    "swizzling keeps the memory": (
        "blocks",
        "setattr(tensor, name, for_gemm([_part(tensor, columnwise)])[0].scale)",
        "getattr(tensor, name).copy_(for_gemm([_part(tensor, columnwise)])[0].scale)",
    ),
    "transposed scales are not": ("blocks", "of_blocks.t().rep", "of_blocks.reshape(wide, high).rep"),
    "no column-wise parts": ("blocks", "(True, quantizer.columnwise_usage)", "(True, False)"),
    "column-wise data come from the row-wise": (
        "blocks",
        "rows.t() if part.columnwise else rows, part",
        "parts[0].matrix(rows.dtype).t() if part.columnwise else rows, part",
    ),
    "the no-op flag is ignored": ("blocks", "noop.item() == 1.0", "noop.item() == 2.0"),
    "no Hadamard transform": ("blocks", "if part.columnwise and rht is not None", "if False"),
    "square blocks are lines": ("blocks", "height = NV_BLOCK if quantizer.with_2d_quantization else 1", "height = 1"),
    "each replay rounds alike": ("blocks", "launch(_draw, [states], states)", "states.fill_(7)"),
    "parts of a grouped product overlap": ("gemm", "row += rows", "row += rows // 2"),
    "scales of groups begin with the first": ("grouped", "at, scale_at = end, scale_end", "at = end"),
    "rows of groups do not add up": ("grouped", "out[at:end]", "out[: end - at]"),
    "gradients are not transposed": ("gemm", "values.t() if self.transposed else values", "values"),
}
"""What is wrong: the module of ``extension/``, what stands there, once, and what comes in its place."""


def edit(file: str, old: str, new: str) -> None:
    """Give the functions of a module of the extension the code that they have after an edit."""
    module = importlib.import_module(f"tests.simulator.extension.{file}")
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{file}.py has {source.count(old)} times {old!r}"
    edited = ModuleType(module.__name__)
    edited.__package__ = module.__package__
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), vars(edited))
    codes = {name: function.__code__ for name, function in _functions(edited)}
    for name, function in _functions(module):
        function.__code__ = codes[name]


def _functions(module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    for owner in (module, *(one for one in vars(module).values() if inspect.isclass(one))):
        for value in vars(owner).values():
            function: Any = inspect.unwrap(value) if callable(value) else value
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                yield function.__qualname__, function


def absent(mutant: str) -> bool:
    """Whether the installed TransformerEngine lacks what a mutant gets wrong."""
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    if MUTANTS[mutant][0] == "grouped":  # since 2.14
        return not importlib.util.find_spec("transformer_engine.pytorch.tensor.storage.grouped_tensor_storage")
    options = {"4over6": "nvfp4_use_4over6", "row-scaled": "row_scaled_nvfp4"}
    return any(name in mutant and option not in NVFP4Quantizer.__annotations__ for name, option in options.items())


def first_failure() -> str | None:
    """The name of the first check that fails."""
    checks = importlib.import_module("tests.simulator.checks.blocks")
    for name, check in vars(checks).items():
        if name.startswith("check_"):
            try:
                check()
            except Exception:
                return name
    return None


if __name__ == "__main__":
    importlib.import_module("tests.simulator.checks.blocks")
    for mutant in (None, *MUTANTS):
        if mutant is not None and absent(mutant):
            continue
        if not (child := os.fork()):
            if mutant is not None:
                edit(*MUTANTS[mutant])
            print(json.dumps({"mutant": mutant, "noticed by": first_failure()}), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
