"""One recipe, one run folder: the training loop and what it needs."""
