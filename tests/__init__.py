"""The tests, and programs that run from a checkout. As a package, they precede any `tests` in site-packages."""
