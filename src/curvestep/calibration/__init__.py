"""lr and max_norm before training: the largest safe step, batch after batch."""
