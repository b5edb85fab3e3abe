"""Corpora: raw text to memory-mapped shards of tokens."""
