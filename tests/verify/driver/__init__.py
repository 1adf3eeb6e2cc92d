"""Train a `Program` (plain data) eagerly or through graphs, and record all results.

``setting.use`` selects the program, ``events.train`` runs it, and ``comparison`` compares two runs. The cases of
``verify`` and the command ``python -m tests.explore`` run such programs.
"""
