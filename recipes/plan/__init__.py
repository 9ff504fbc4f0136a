"""plan=true: what a recipe will need, counted before anything is loaded."""
