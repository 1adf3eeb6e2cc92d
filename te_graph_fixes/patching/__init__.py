"""Python text: find a shape in it by syntax, edit it, and replace running code by the result."""

TE = "transformer_engine"
PACKAGE = f"{TE}.pytorch"
"""The package that the fixes edit. Importing it imports every module that a fix edits."""
