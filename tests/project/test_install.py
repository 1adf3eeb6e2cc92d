"""Test the pages about installing and starting the package: images.md, install.md, launchers.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from te_graph_fixes.commands.cli import COMMANDS
from te_graph_fixes.commands.run import variables
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.settings import CHECK, DISABLE, SWITCH, VARIABLES
from tests.support.child import ROOT, python
from tests.support.published import needed, source

DOCS = ROOT / "docs"


def test_no_page_installs_the_package_from_an_index() -> None:
    """The package is on no index, so the command would fail, or install an unrelated package."""
    for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]:
        blocks = re.findall(r"```.*?```|(?<!`)`[^`\n]+`", page.read_text(), re.DOTALL)
        commands = [
            block for block in blocks if re.search(r"(pip|uv)[^\n&]* (install|download)[^\n&]* te-graph-fixes", block)
        ]
        assert not [command for command in commands if command != "`pip install te-graph-fixes`"], page
    assert "`pip install te-graph-fixes` fails" in (DOCS / "install.md").read_text()


@pytest.mark.parametrize("name", ["images.md", "install.md", "launchers.md"])
def test_every_command_exists(name: str) -> None:
    named = re.findall(r"`(?:te-graph-fixes|RUN te-graph-fixes) ([a-z]+)", (DOCS / name).read_text())
    assert set(named) <= set(COMMANDS)


def test_images_shows_the_figures_of_nemo_26_04() -> None:
    """The page must show the numbers of TE 2.14.0, because the container's TE is a build of this release."""
    page = (DOCS / "images.md").read_text()
    verdicts = needed("2.14.0")
    modules = {name for verdict in verdicts.values() for name in verdict.targets}
    summary = python("-m", "te_graph_fixes", "status", path=source("2.14.0")).stdout.splitlines()[0]
    assert f"$ te-graph-fixes status\n{summary.replace('2.14.0', '2.14.0+71bbefbf')}\n" in page
    assert re.search(rf"\b{len(verdicts)} fixes\b.*\b{len(modules)} modules", page)


SCRIPTS = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", (DOCS / "launchers.md").read_text(), re.DOTALL)
SRUN = """#!{python}
import itertools, os, subprocess, sys
options = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: word[:2] == "--", sys.argv[1:]))
environment = dict(os.environ)
if "--container-image" in options:  # the image's variables replace the job's variables
    own = {{"PYTHONPATH": {path!r}, "TE_GRAPH_FIXES": "image"}}
    environment |= {{name: value for name, value in own.items() if name not in options["--container-env"].split(",")}}
assert options["--kill-on-bad-exit"] == "1"
for rank in "01":
    environment |= {{"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NTASKS": "2"}}
    subprocess.run(sys.argv[1 + len(options):], env=environment, check=True)
"""
JOB = f"""
import os, sys
checked = os.environ.pop("{CHECK}", None)  # the check needs torch
import transformer_engine.pytorch
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "{SWITCH}"
print(*map(os.environ.get, names), checked, "te_graph_fixes" in sys.modules, *sys.argv[1:])
"""


@pytest.mark.parametrize(
    "script", SCRIPTS, ids=["check", "training", "check in a container", "training in a container"]
)
def test_a_slurm_script(script: str, tmp_path: Path) -> None:
    """With stand-ins for Slurm, pyxis and TE, two ranks of the script get the variables and the fixes."""
    path = f"{tmp_path / 'site'}:{ROOT}"
    files = {
        "bin/srun": SRUN.format(python=sys.executable, path=path),
        "bin/scontrol": "#!/bin/sh\necho host-1\necho host-2\n",
        "bin/python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        "bin/te-graph-fixes": f'#!/bin/sh\nexec {sys.executable} -m te_graph_fixes "$@"\n',
        "pretrain_gpt.py": JOB,
        "site/transformer_engine/__init__.py": "",
        "site/transformer_engine/pytorch/__init__.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(SWITCH)}
    slurm = {"SLURM_JOB_NODELIST": "host-[1-2]", "CHECKPOINT": "last", "IMAGE": "image", "DATA": "/data:/data"}
    own = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": path, DISABLE: ",".join(CATALOGUE)}
    command, environment = ["bash", "-c", script], {**inherited, **slurm, **own}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    is_check = "--check" in script
    switch = "off" if is_check else "on" if "--container" in script else None
    arguments = "--load last --finetune --exit-interval 10 ..." if is_check else "--load last --save last ..."
    lines = [f"{rank} {rank} 2 host-1 {switch} {'on' if is_check else None} True {arguments}" for rank in "01"]
    assert (done.returncode, done.stdout.splitlines()) == (0, lines), done.stderr


@pytest.mark.parametrize("option", ["--export", "--container-env"])
def test_lists_of_variables_are_complete(option: str) -> None:
    """The longest list of each launcher option must name every setting, and every variable that `run` sets."""
    lists = re.findall(rf"{option}=([A-Z_,]+)", (DOCS / "launchers.md").read_text())
    assert {*variables(), *VARIABLES} <= {*max(lists, key=len).split(",")}
