"""Norms over lists of tensors."""
