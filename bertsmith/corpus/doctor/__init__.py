"""The doctor: finds problems of a text that would harm the training."""
