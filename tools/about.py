"""tox run: lint, types, the tests without torch, and those on TransformerEngine 2.10 to the newest, on a CPU.

The first time it takes 6 to 8 minutes on two cores, 2.6 GB in .tox and 0.6 GB of downloads; later half a minute less.
PyPI's torch for Linux brings CUDA, which is some GB more; PIP_EXTRA_INDEX_URL may name an index with a CPU build.
CONTRIBUTING.md has the time of each part, and of the rest of the full set: tox run -m rest, 9 minutes more.
"""

import shutil

if __name__ == "__main__":
    print(f"{__doc__}There are {shutil.disk_usage('.').free / 1e9:.1f} GB free here.")
