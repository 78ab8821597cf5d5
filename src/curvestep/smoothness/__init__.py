"""Measurement of smoothness along a training run: the probe, its estimators, and what they need."""
