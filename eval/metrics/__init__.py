"""How good pictures are, and how far from the backbone's own distribution."""
