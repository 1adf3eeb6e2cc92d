"""Run every Python process on the simulator, child processes included, if this folder is first on ``PYTHONPATH``."""

from tests.simulator import install

install()
