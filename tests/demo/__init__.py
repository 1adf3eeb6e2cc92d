"""A small MoE model trained through TransformerEngine's own graph code on the CPU, without and with the fixes."""
