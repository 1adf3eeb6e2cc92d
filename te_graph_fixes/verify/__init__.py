"""The GPU cases: each defect, graph replay against eager, through TransformerEngine's public API."""
