"""One training loop for any model whose forward pass returns losses. It depends on no model, data set or task."""
