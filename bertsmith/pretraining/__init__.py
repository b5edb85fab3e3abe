"""Pre-training: a corpus and a configuration to a model."""
