"""The tests, and programs that run from a checkout.

Because this folder is a package, no `tests` package in site-packages can hide it.
"""
