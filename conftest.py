"""What pytest may collect from the package on this machine."""

from __future__ import annotations

from importlib.util import find_spec

# The examples in docstrings are collected by importing every module, and these need Triton to be imported.
collect_ignore_glob = [] if find_spec("triton") else ["sparse_lightning/kernels/*/triton.py"]
