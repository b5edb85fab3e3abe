"""The encoder of the paper and its heads."""
