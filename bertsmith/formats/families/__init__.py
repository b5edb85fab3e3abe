"""The families that we read and write: one module for each, and the table of them."""
