"""From a recipe to a run: the schema of all keys, what a machine must have, building, training, finishing."""
