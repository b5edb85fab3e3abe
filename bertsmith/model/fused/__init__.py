"""Triton kernels and autograd operations on them; imported only when they are used."""
