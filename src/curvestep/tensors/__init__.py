"""Lists of tensors as one vector: norms and products, ranks and shards, and the compiled kernel."""
