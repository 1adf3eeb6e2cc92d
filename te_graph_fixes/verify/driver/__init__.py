"""One driver: trains a `Program`, plain data, eagerly or through graphs, and keeps all that it computes.

``events.train`` runs the program that ``setting.use`` has set, ``comparison`` compares two runs. The cases of
``verify`` are such programs, and so are those that ``python -m tests.explore`` draws.
"""
