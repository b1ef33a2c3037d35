"""``patch``: our ops in models of Hugging Face."""
