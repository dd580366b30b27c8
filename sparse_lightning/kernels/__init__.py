"""Kernels: one folder for each operation, the reference in plain torch beside what makes it fast."""
