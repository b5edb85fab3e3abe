"""The doctor: what would spoil a training run."""
