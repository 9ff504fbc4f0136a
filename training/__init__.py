"""How heads (or the demo's backbone) are trained: modules, strategies, checkpoints, export. Knows no recipe."""
