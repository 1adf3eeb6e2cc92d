"""The tests, and programs that run from a checkout. A `tests` in site-packages cannot hide this package."""
