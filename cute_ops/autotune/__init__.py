"""Finding the fastest config by measuring, and remembering it."""
