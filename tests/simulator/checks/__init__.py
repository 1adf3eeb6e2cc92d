"""Checks of the simulator: functions ``check_*``, which raise an error if the simulator differs from a GPU or from TE.

The checks run inside the simulator: ``python -m tests.simulator -m tests.simulator.checks graphs extension``. The file
``tests/simulator/test_simulator.py`` runs them and reports each check as a test.
"""
