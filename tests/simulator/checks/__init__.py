"""Checks of the simulator: functions ``check_*``, which raise an error if the simulator behaves differently.

They run inside the simulator: ``python -m tests.simulator -m tests.simulator.checks graphs extension``. The file
``tests/simulator/test_simulator.py`` does so and reports each as a test.
"""
