"""``patch``: Hugging Face models on our ops."""
