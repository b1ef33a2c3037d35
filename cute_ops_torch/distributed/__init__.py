"""DTensors and sharded models."""
