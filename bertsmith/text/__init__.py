"""Tokenizers and sentences. Imports without torch."""
