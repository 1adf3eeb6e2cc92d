"""Find patterns in Python source by syntax, edit the source, and replace running code with the result."""

TE = "transformer_engine"
PACKAGE = f"{TE}.pytorch"
"""The package that the fixes edit. Importing it imports every module that a fix edits."""
