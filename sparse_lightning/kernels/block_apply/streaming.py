"""block_apply for large weights on x86 CPUs: zeros are stored past the caches.

Any other store first loads the cache line that it writes to, and what does not fit into the caches comes from memory
and goes back. Here only the pruned blocks are written, and nothing is read: less than half of what `cpu.filler` moves.
It is a few lines of C++, built where they are first needed, by the compiler that `torch.compile` uses.
"""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from sparse_lightning.kernels.availability import cpp_compiler

LARGE = 1 << 22
"""Bytes of a window from which on its weights are not expected in a cache, neither now nor when they are next read."""

RUN = 64
"""Bytes of a cache line: a block must fill at least one in a row."""


class _Pair(ctypes.Structure):
    """Two dimensions of a window: blocks and their elements, with strides in bytes, and the stride of the mask."""

    _fields_ = [(name, ctypes.c_int64) for name in ("blocks", "elements", "block", "element", "mask")]


def takes(window: Tensor) -> bool:
    """Whether zeros are to be streamed into this window."""
    run = window.shape[-1] * window.element_size() if window.ndim else 0
    return window.nbytes >= LARGE and run >= RUN and window.stride(-1) == 1 and _library() is not None


def filler(window: Tensor, mask: Tensor) -> Callable[[], None]:
    """A `fill_` that is repeated at every step."""
    library, mask, size = _library(), mask.contiguous(), window.element_size()
    assert library is not None, "`takes` has looked"
    pairs = _pairs(window, mask)
    run = window.shape[-1] * size

    def fill() -> None:
        threads = torch.get_num_threads()
        library.fill(window.data_ptr(), mask.data_ptr(), pairs, len(pairs), run, threads)
        # Nobody else tells autograd of it.
        if not window.is_inference():
            torch.autograd.graph.increment_version(window)

    return fill


def _pairs(window: Tensor, mask: Tensor) -> ctypes.Array[_Pair]:
    """What the kernel is told of a window; the blocks of a single pair are rows, for the threads to share."""
    size, sizes, strides = window.element_size(), window.shape, window.stride()
    pairs = [
        _Pair(sizes[2 * d], sizes[2 * d + 1], strides[2 * d] * size, strides[2 * d + 1] * size, step)
        for d, step in enumerate(mask.stride())
    ]
    if len(pairs) == 1:
        [one] = pairs
        pairs = [_Pair(one.blocks, 1, one.block, 0, one.mask), _Pair(1, one.elements, 0, one.element, 0)]
    return (_Pair * len(pairs))(*pairs)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    """The kernel, built for this process; None where there is no compiler, or another kind of machine."""
    compiler = cpp_compiler()
    if compiler is None or sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    try:
        return _built_with(compiler)
    except (subprocess.CalledProcessError, OSError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()[:500]
        warnings.warn(
            f"{compiler} could not build a kernel, so pruned weights are held by torch operations, which takes about "
            f"twice as long. It said: {said}",
            stacklevel=2,
        )
        return None


def _built_with(compiler: str) -> ctypes.CDLL:
    source, options = Path(__file__).with_suffix(".cpp"), ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "streaming.so"
        subprocess.run([compiler, *options, source, "-o", built], capture_output=True, text=True, check=True)
        library = ctypes.CDLL(str(built))  # it stays when the file goes
    library.fill.argtypes = [ctypes.c_void_p] * 2 + [ctypes.POINTER(_Pair)] + [ctypes.c_int64] * 2 + [ctypes.c_int]
    library.fill.restype = None
    return library
