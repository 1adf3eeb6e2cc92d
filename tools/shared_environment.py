"""Install torch, and other packages that TransformerEngine (TE) and the tests import, once for all tox environments.

    python tools/shared_environment.py FOLDER

The first call creates a virtual environment in FOLDER, and the first call after a change of `REQUIREMENTS` creates it
again. Every call writes a ``.pth`` file into the tox environment of the running interpreter, which must have the same
Python version as FOLDER. The interpreter then imports from FOLDER any package that its own environment lacks.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

REQUIREMENTS = """\
torch==2.13.0
triton
einops
onnx
onnxscript
pydantic
importlib-metadata
nvdlfw-inspect
numpy
packaging
wrapt>=1.16,<3
pytest
pytest-xdist
hypothesis
"""


def site_packages(folder: Path) -> Path:
    """Return the site-packages folder of the environment in ``folder``.

    Create the environment if it is missing or has other requirements.
    """
    done = folder / "requirements.txt"
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not packages.is_dir() or not done.is_file() or done.read_text() != REQUIREMENTS:
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=True)
            requirements = folder / "requirements.new"
            requirements.write_text(REQUIREMENTS)
            pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--no-compile"]
            subprocess.run([*pip, "-r", requirements], check=True)
            requirements.rename(done)
    return packages


if __name__ == "__main__":
    packages = site_packages(Path(sys.argv[1]).resolve())
    os.makedirs(sysconfig.get_path("purelib"), exist_ok=True)
    Path(sysconfig.get_path("purelib"), "shared.pth").write_text(f"{packages}\n")
