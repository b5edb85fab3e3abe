"""Inference: a saved model to predictions, vectors and features."""
