"""Run every Python process on the simulator, child processes included, if this folder is first on ``PYTHONPATH``.

PYTHONPATH=$PWD/tests/simulator/everywhere:$PWD:$PYTHONPATH python -m tests.verify --json
"""

from tests.simulator import install

install()
