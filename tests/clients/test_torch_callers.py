"""Test that the tools of torch that unwrap functions (`torch.compile`, TorchScript) see the fixed code."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from te_graph_fixes.patching.installation import Change, Installation
from te_graph_fixes.patching.source import Edit, Source

pytestmark = pytest.mark.te


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("way", ["compiled caller", "compiled", "scripted", "saved forward"])
def test_torch_runs_the_fixed_code(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    name = f"standin_of_torch_{way.replace(' ', '_')}"
    package, code = tmp_path / name, f"{name}.code"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "code.py").write_text(
        "import torch\n\ndef run(x: torch.Tensor) -> torch.Tensor:\n    return x + 1\n\n"
        "class Module(torch.nn.Module):\n    def forward(self, x):\n        return run(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(code)
    source = Source(str(package), None)
    start = source.module(code).text.index("x + 1")
    edit = Edit(code, start, start + len("x + 1"), "x + 2")
    installation = Installation(source, {"fix": Change(edits=(edit,))})
    instance = module.Module()
    saved = instance.forward
    installation.install()
    calls = {
        "compiled caller": lambda: torch.compile(lambda x: module.run(x) * 1, backend="eager", fullgraph=True),
        "compiled": lambda: torch.compile(module.run, backend="eager", fullgraph=True),
        "scripted": lambda: torch.jit.script(module.run),
        "saved forward": lambda: saved,
    }
    assert calls[way]()(torch.zeros(1)).item() == 2
    installation.revert()
    torch.compiler.reset()
    assert way == "scripted" or calls[way]()(torch.zeros(1)).item() == 1  # torch caches scripted functions
