"""How peers combine tensors: the chunk grid, codecs, the reduce, the bit-exact outer step."""
