"""One training loop for anything whose forward gives losses. Knows no model, no data set, no task."""
