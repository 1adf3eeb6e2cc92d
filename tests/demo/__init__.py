"""A demo that trains a small MoE model on a CPU eagerly, with TransformerEngine's graphs, and with the fixes."""
