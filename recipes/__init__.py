"""One YAML file per run people make, and the schema they fill in."""
