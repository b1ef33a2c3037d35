"""What surrounds attention: its caches of keys and values."""
