"""From a planned call to a loaded kernel: plan, compile, cache, load."""
