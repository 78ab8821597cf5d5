"""Measuring local smoothness along a training run."""
