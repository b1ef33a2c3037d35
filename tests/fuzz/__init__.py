"""Commands that draw inputs at random for as long as one likes: ``python -m tests.fuzz.parsers --help``."""
