"""Test cases that compare graph replays with eager training on the user's GPU, without and with the fixes.

`cases` is the registry of the cases. `runner` runs them in child processes (`child`). The cases call the other modules,
which use TransformerEngine's public API and do not depend on the fixes.
"""
