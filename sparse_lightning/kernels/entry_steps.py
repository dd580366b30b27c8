"""Elementwise steps on one entry per block, in C++: state is read, computed and written at the speed of memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sparse_lightning.compat.torch import has_dispatch_mode
from sparse_lightning.kernels.expressions import EXPRESSIONS, HELPERS, OPTIONS, expression, lines
from sparse_lightning.kernels.native import library_of
from sparse_lightning.kernels.stage import Ref, Step

SMALL = 1 << 15
"""Entries up to which one thread is faster than waking others."""

_KERNEL = """
#include <algorithm>
#include <cmath>
#include <cstdint>

using T = float;
constexpr int64_t TOGETHER = 4096;
{helpers}
// Returns whether all results are finite. They are written only if `writes`, each over an input or elsewhere.
extern "C" int run(int64_t count, const T* const* inputs, T* const* results, int writes, int threads) {{
    int broken = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : broken) if (threads > 1)
    for (int64_t begin = 0; begin < count; begin += TOGETHER) {{
        const int64_t end = std::min(count, begin + TOGETHER);
        T difference = 0;  // of each result and itself: NaN as soon as one is not finite
        if (writes) {{
#pragma omp simd reduction(+ : difference)
            for (int64_t j = begin; j < end; j++) {{
{steps}
{stores}
{checks}
            }}
        }} else {{
#pragma omp simd reduction(+ : difference)
            for (int64_t j = begin; j < end; j++) {{
{steps}
{checks}
            }}
        }}
        broken |= difference != 0;
    }}
    return !broken;
}}
"""


@dataclass(frozen=True)
class EntrySteps:
    """Steps on entries in fp32.

    Attributes:
        inputs: the number of inputs, which are the first values.
        steps: the operations in order.
        results: the values that are written.
    """

    inputs: int
    steps: tuple[Step, ...]
    results: tuple[Ref, ...]

    def run(self, inputs: Sequence[Tensor], results: Sequence[Tensor], writes: bool) -> bool | None:
        """Compute the results; return whether all are finite, or None if there is no kernel for these steps.

        Args:
            inputs: contiguous, in fp32 on the CPU.
            results: where to write, such as over inputs: contiguous, in fp32.
            writes: whether to write, or only to look whether results are finite.
        """
        built = None if has_dispatch_mode() else _built(self)
        if built is None:
            return None
        count = results[0].numel()
        finite: int = built(
            ctypes.c_int64(count),
            (ctypes.c_void_p * len(inputs))(*(tensor.data_ptr() for tensor in inputs)),
            (ctypes.c_void_p * len(results))(*(tensor.data_ptr() for tensor in results)),
            ctypes.c_int(writes),
            ctypes.c_int(torch.get_num_threads() if count > SMALL else 1),
        )
        return bool(finite)


@lru_cache(maxsize=256)
def _built(steps: EntrySteps) -> Callable[..., int] | None:
    if any(step.operation not in EXPRESSIONS for step in steps.steps):
        return None
    built = library_of("entry_steps", source_of(steps), OPTIONS)
    return None if built is None else built.run


def source_of(steps: EntrySteps) -> str:
    """Return the C++ source."""
    loads = [f"const T v{i} = inputs[{i}][j];" for i in range(steps.inputs)]
    loads += [f"const T v{steps.inputs + i} = {expression(step)};" for i, step in enumerate(steps.steps)]
    results = [f"v{ref.at}" for ref in steps.results]
    return _KERNEL.format(
        helpers=HELPERS,
        steps=lines(loads, 16),
        stores=lines([f"results[{i}][j] = {value};" for i, value in enumerate(results)], 16),
        checks=lines([f"difference += {value} - {value};" for value in results], 16),
    )
