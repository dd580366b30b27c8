"""Kernels: one folder for each operation, with the reference in plain torch beside the fast versions."""
