"""The server: every head of a model over HTTP, with batches that are made across requests."""
