"""With this folder first on ``PYTHONPATH``, every Python of the environment runs on the simulator, children included.

PYTHONPATH=$PWD/tests/simulator/everywhere:$PWD:$PYTHONPATH python -m tests.verify --json
"""

from tests.simulator import install

install()
