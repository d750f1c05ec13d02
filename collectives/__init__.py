"""Combining tensors between peers: the chunk grid, codecs, the reduce, the bit-exact outer step."""
