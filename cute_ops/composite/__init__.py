"""Functions made of several ops: what both adapters share."""
