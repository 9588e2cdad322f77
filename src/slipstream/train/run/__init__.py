"""A whole run: recipe, plan, steps, and the folder that comes of it."""
