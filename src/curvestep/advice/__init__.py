"""From (L0, L1) to lr and max_norm, and the reasons."""
