"""Test cases for the user's own GPU: graph replay against eager training, without and with the fixes.

`cases` is the registry. `runner` runs cases in child processes (`child`). The cases call the other modules, which use
TransformerEngine's public API and do not depend on the fixes.
"""
