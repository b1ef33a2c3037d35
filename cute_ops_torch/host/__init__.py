"""From a call to its kernel, with as little host time as possible."""
