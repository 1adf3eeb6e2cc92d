"""Checks of the simulator itself: functions ``check_*`` that raise if it does not behave as described.

They run inside the simulator: ``python -m tests.simulator -m tests.simulator.checks graphs extension``. The file
``tests/simulator/test_simulator.py`` does so and reports each as a test.
"""
