"""Kernels written in Triton, and the operations that are made of them. Nothing here is imported before it is needed."""
