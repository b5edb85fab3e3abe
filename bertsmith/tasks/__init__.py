"""Labelled data: reading, encoding, metrics."""
