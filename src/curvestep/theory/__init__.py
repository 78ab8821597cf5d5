"""The theory of the paper as numbers; needs numpy and scipy only. Import its names from their modules."""
