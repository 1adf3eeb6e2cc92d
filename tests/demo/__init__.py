"""A demo that trains a small MoE model through TransformerEngine's graphs on the CPU, without and with the fixes."""
