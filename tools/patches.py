"""``python -m tools.patches FOLDER``: write a patch for each supported release of TransformerEngine (TE).

To apply a patch, run ``patch -p1 --dry-run`` and then ``patch -p1`` in the folder that contains ``transformer_engine``.
For a vendor's build, which no package index has, run ``te-graph-fixes diff`` in the vendor's container.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import sys
from pathlib import Path

from te_graph_fixes.commands.cli import main as command
from tests.support.published import COVERED, source

SUMS = "SHA256SUMS"


def write(folder: Path, *versions: str) -> None:
    """Write the patches for these versions, and ``SHA256SUMS`` for ``sha256sum --check``, into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = ""
    for version in versions:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            status = command(["diff", "--source", str(source(version))])
        if status or not out.getvalue():
            raise SystemExit(f"no patch for TransformerEngine {version}: `te-graph-fixes diff` ended with {status}")
        name = f"transformer_engine-{version}.patch"
        (folder / name).write_text(out.getvalue())
        sums += f"{hashlib.sha256(out.getvalue().encode()).hexdigest()}  {name}\n"
    (folder / SUMS).write_text(sums)


if __name__ == "__main__":
    write(Path(sys.argv[1]), *COVERED)
