"""The tests, and programs that run from a checkout.

Without this file, Python would prefer a package `tests` in site-packages to this folder.
"""
