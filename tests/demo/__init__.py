"""A small MoE model trained through TransformerEngine's own graph code on the CPU, without and with the fixes.

``python -m tests.demo`` prints the table; ``train`` is what its child processes run.
"""
