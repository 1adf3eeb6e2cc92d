"""Test cases that compare graph replays with eager training on the user's GPU, without and with the fixes.

`cases` is the registry of the cases. `runner` runs them in child processes, whose program is `child`. A case calls
`programs` or `memory`, which run programs of `driver`.
"""
