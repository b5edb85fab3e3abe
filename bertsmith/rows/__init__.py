"""Labelled rows, read from files and tables."""
