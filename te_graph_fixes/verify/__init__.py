"""The user's own proof on the user's own GPU: each defect, graph replay against eager, without and with the fixes.

`cases` is the registry. `runner` measures cases in child processes, which run `child`. The other modules are what the
cases call; they use TransformerEngine through its public API and know nothing of the fixes.
"""
