"""block_score in C++ for CPUs: each stage becomes a kernel that reads the windows once, at the speed of memory.

A row of blocks is read row by row of elements, and each element is folded into a value of its own, in the L1 cache;
the values of a block are folded at its end. So every loop runs over contiguous elements, whatever the block size.
Threads take whole rows of blocks: results do not depend on their number.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from sparse_lightning.compat.torch import has_dispatch_mode
from sparse_lightning.kernels.block_score import compiled
from sparse_lightning.kernels.expressions import EXPRESSIONS, HELPERS, OPTIONS, expression, lines
from sparse_lightning.kernels.native import is_supported, library_of
from sparse_lightning.kernels.stage import FoldKind, Stage

SMALL = 1 << 15
"""Elements of a window up to which one thread is faster than waking others."""

WIDEST = 1 << 16
"""The longest run of elements of one block: what is folded side by side has to stay in a cache."""

LINE = 64
"""Bytes of a cache line: memory is read by whole ones, so that shorter blocks can't be passed over."""

TYPES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "BFloat16"}

_COMBINE: dict[FoldKind, str] = {"sum": "{} + {}", "max": "highest({}, {})", "min": "lowest({}, {})"}
_IDENTITY: dict[FoldKind, str] = {"sum": "0", "max": "-INFINITY", "min": "INFINITY"}

_KERNEL = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

using T = {accumulated};

constexpr int64_t STEP = 512, AHEAD = 8192, ROWS = 16, GROUP = 64, LINE = 64;

// Prefetches memory that is read a little later, into the L2 cache: more lines can be under way to it than to L1.
// What lies outside of a tensor is never read.
template <typename E>
static inline void fetch(const E* begin, int64_t number) {{
    const char* at = reinterpret_cast<const char*>(begin);
    for (int64_t byte = 0; byte < number * int64_t(sizeof(E)); byte += LINE) __builtin_prefetch(at + byte, 0, 2);
}}

struct BFloat16 {{
    uint16_t bits;
    operator float() const {{
        const uint32_t wide = uint32_t(bits) << 16;
        float value;
        std::memcpy(&value, &wide, 4);
        return value;
    }}
}};

{helpers}

// Elements [begin, end) of a row: neighbouring blocks that are read.
struct Run {{
    int64_t begin, end;
}};

// Blocks side by side, with the elements at their first coordinates in each input, and their place in the grids.
struct Item {{
    const char* at[{inputs}];
    int64_t number = 0, place = 0;
    std::vector<Run> runs;
}};

// pairs: blocks and elements of each pair of dimensions, outermost first. strides: for each input those of the blocks
// and of the elements of each pair but the last, in bytes. A row is the last pair, contiguous in all inputs.
// inputs: the addresses of the windows, for each of the tensors that lie alike. Their grids follow each other.
// zeros: for each entry of the grids whether it is zero, so that its elements need not be read; or null.
extern "C" void fold(int64_t tensors, int64_t count, const int64_t* pairs, const int64_t* strides,
                     const char* const* inputs, const uint8_t* zeros, T* const* grids, int threads) {{
    const int64_t outer = count - 1, last = pairs[2 * outer], length = pairs[2 * outer + 1];
    const int64_t together = std::max<int64_t>(1, 4096 / length), chunks = (last + together - 1) / together;
    const int64_t sizes[] = {{{sizes}}};
    int64_t blocks = 1, elements = 1;
    for (int64_t d = 0; d < outer; d++) blocks *= pairs[2 * d], elements *= pairs[2 * d + 1];
    const int64_t items = tensors * blocks * chunks;

    const auto prepare = [&](int64_t item, Item& into) {{
        const int64_t begin = item % chunks * together;
        into.number = std::min(together, last - begin), into.place = item / chunks * last + begin;
        for (int i = 0; i < {inputs}; i++) {{
            int64_t rest = item / chunks % blocks;
            into.at[i] = inputs[item / chunks / blocks * {inputs} + i] + begin * length * sizes[i];
            for (int64_t d = outer - 1; d >= 0; d--) {{
                into.at[i] += rest % pairs[2 * d] * strides[2 * (i * outer + d)];
                rest /= pairs[2 * d];
            }}
        }}
        auto& runs = into.runs;
        runs.clear();
        if (!zeros) runs.push_back({{0, into.number * length}});
        for (int64_t b = 0; zeros && b < into.number; b++) {{
            if (zeros[into.place + b]) continue;
            if (runs.empty() || runs.back().end != b * length) runs.push_back({{b * length, b * length}});
            runs.back().end += length;
        }}
    }};

#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
    for (int thread = 0; thread < threads; thread++) {{
        const int64_t begin = items * thread / threads, end = items * (thread + 1) / threads;
        std::vector<T> room({folds} * std::min(together, last) * length);
        int64_t offsets[GROUP][{inputs}];
        Item item, next;
        if (begin < end) prepare(begin, item);
        for (int64_t index = begin; index < end; index++, std::swap(item, next)) {{
            if (index + 1 < end) prepare(index + 1, next);
            else next.runs.clear();
            const int64_t number = item.number, width = number * length, place = item.place;
{room}
            for (int64_t base = 0; base < elements; base += GROUP) {{
                const int64_t group = std::min(GROUP, elements - base);
                for (int64_t g = 0; g < group; g++) {{
                    for (int i = 0; i < {inputs}; i++) {{
                        int64_t rest = base + g;
                        offsets[g][i] = 0;
                        for (int64_t d = outer - 1; d >= 0; d--) {{
                            offsets[g][i] += rest % pairs[2 * d + 1] * strides[2 * (i * outer + d) + 1];
                            rest /= pairs[2 * d + 1];
                        }}
                    }}
                }}
                // Block after block, so that the processor does not load what is passed over between them.
                for (size_t r = 0; r < item.runs.size(); r++) for (int64_t g = 0; g < group; g++) {{
                    const Run run = item.runs[r];
                    // Where all blocks are read, memory follows; where some are passed over, the rows of the next ones.
                    const bool same = g + ROWS < group, inside = same || r + 1 < item.runs.size();
                    if (zeros && (inside || !next.runs.empty())) {{
                        const Run coming = inside ? item.runs[same ? r : r + 1] : next.runs[0];
                        const char* const* there = inside ? item.at : next.at;
                        const int64_t* offset = offsets[(g + ROWS) % group];
{nexts}
                    }}
                    const int64_t* offset = offsets[g];
{rows}
                    for (int64_t from = run.begin; from < run.end; from += STEP) {{
                        const int64_t to = std::min(run.end, from + STEP);
                        if (!zeros) {{
{fetches}
                        }}
                        if (base + g == 0) {{
#pragma omp simd
                            for (int64_t j = from; j < to; j++) {{
{values}
{first}
                            }}
                        }} else {{
#pragma omp simd
                            for (int64_t j = from; j < to; j++) {{
{values}
{combined}
                            }}
                        }}
                    }}
                }}
            }}
{grids}
        }}
    }}
}}
"""


def is_available() -> bool:
    """Whether kernels can be built on this machine."""
    return is_supported()


def fold(stage: Stage, windows: Sequence[Tensor]) -> list[Tensor]:
    """Run a stage on windows `(n0, l0, n1, l1, …)` of one shape; each fold returns a grid `(n0, n1, …)`.

    The last two dimensions must be contiguous in all windows. What the kernel does not take is compiled.
    """
    grids = fold_many(stage, windows, [[window] for window in windows])
    return compiled.fold(stage, windows) if grids is None else [grid[0] for grid in grids]


def fold_many(
    stage: Stage,
    windows: Sequence[Tensor],
    tensors: Sequence[Sequence[Tensor]],
    zeros: Tensor | None = None,
    into: Sequence[Tensor] | None = None,
) -> list[Tensor] | None:
    """Run a stage on several tensors that lie alike, where they are: each fold returns grids `(tensors, n0, n1, …)`.

    Args:
        stage: what to compute.
        windows: of the first tensor of each input, as in `fold`.
        tensors: for each input the tensors that hold such a window.
        zeros: `(tensors, n0, n1, …)`, True where all folds of a block are known to be zero: it need not be read.
        into: contiguous grids that are overwritten, of the dtype that `grid_dtype` returns; None for new ones.

    Returns:
        The grids; None if the kernel does not take these windows, or the tensors differ in their strides.
    """
    if has_dispatch_mode() or not _takes(windows) or not all(map(_are_alike, tensors)):
        return None
    built = _built(stage, tuple(window.dtype for window in windows))
    if built is None:
        return None
    first, number = windows[0], len(tensors[0])
    shape, dtype = (number, *first.shape[0::2]), grid_dtype(windows)
    grids = [torch.empty(shape, dtype=dtype) for _ in stage.folds] if into is None else list(into)
    strides = [s * window.element_size() for window in windows for s in window.stride()[:-2]]
    is_short = first.shape[-1] * first.element_size() < LINE
    zeros = None if zeros is None or is_short else zeros.contiguous()
    begins = [window.data_ptr() - own[0].data_ptr() for window, own in zip(windows, tensors, strict=True)]
    addresses = [[t.data_ptr() + begin for t in own] for own, begin in zip(tensors, begins, strict=True)]
    built(
        ctypes.c_int64(number),
        ctypes.c_int64(first.ndim // 2),
        _integers(first.shape),
        _integers(strides),
        _integers([address for own in zip(*addresses, strict=True) for address in own]),
        ctypes.c_void_p(None if zeros is None else zeros.data_ptr()),
        _integers([grid.data_ptr() for grid in grids]),
        ctypes.c_int(torch.get_num_threads() if number * first.numel() > SMALL else 1),
    )
    return grids


def grid_dtype(windows: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype that the kernel of these windows computes in."""
    return torch.float64 if any(window.dtype == torch.float64 for window in windows) else torch.float32


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    first = tensors[0]
    return all(t.stride() == first.stride() and t.dtype == first.dtype for t in tensors[1:])


def _integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _takes(windows: Sequence[Tensor]) -> bool:
    shape = windows[0].shape
    if not len(shape) > 0 or not math.prod(shape) > 0 or shape[-1] > WIDEST:
        return False
    return all(window.dtype in TYPES and window.device.type == "cpu" and _is_contiguous(window) for window in windows)


def _is_contiguous(window: Tensor) -> bool:
    """Whether the last pair of dimensions is a run of neighbouring elements."""
    (blocks, length), (block, element) = window.shape[-2:], window.stride()[-2:]
    return (length == 1 or element == 1) and (blocks == 1 or block == length)


@lru_cache(maxsize=256)
def _built(stage: Stage, dtypes: tuple[torch.dtype, ...]) -> Callable[..., None] | None:
    """Return the kernel of a stage; None if it has operations that are not vectorized, or cannot be built."""
    if any(step.operation not in EXPRESSIONS for step in stage.steps):
        return None
    built = library_of("block_score", source_of(stage, dtypes), OPTIONS)
    return None if built is None else built.fold


def source_of(stage: Stage, dtypes: Sequence[torch.dtype]) -> str:
    """Return the C++ source of a stage on windows of these dtypes."""
    inputs, folds = range(stage.inputs), range(len(stage.folds))
    types = [TYPES[dtype] for dtype in dtypes]
    typed = list(enumerate(types))
    loads = [f"const T v{i} = row{i}[j];" for i in inputs]
    steps = [f"const T v{stage.inputs + i} = {expression(step)};" for i, step in enumerate(stage.steps)]
    values = [f"v{ref.at}" for ref, _ in stage.folds]
    kinds = [kind for _, kind in stage.folds]
    return _KERNEL.format(
        helpers=HELPERS,
        accumulated="double" if "double" in types else "float",
        inputs=stage.inputs,
        folds=len(stage.folds),
        room=lines([f"T* const room{f} = room.data() + {f} * width;" for f in folds], 12),
        sizes=", ".join(f"sizeof({t})" for t in types),
        nexts=lines([f"fetch({_row(i, t, 'there')} + coming.begin, coming.end - coming.begin);" for i, t in typed], 24),
        rows=lines([f"const {t}* row{i} = {_row(i, t, 'item.at')};" for i, t in typed], 20),
        fetches=lines([f"fetch(row{i} + from + AHEAD / sizeof({t}), to - from);" for i, t in typed], 28),
        values=lines([*loads, *steps], 32),
        first=lines([f"room{f}[j] = {values[f]};" for f in folds], 32),
        combined=lines([f"room{f}[j] = {_COMBINE[kinds[f]].format(f'room{f}[j]', values[f])};" for f in folds], 32),
        grids=lines([line for f in folds for line in _grid(f, kinds[f])], 12),
    )


def _row(i: int, kind: str, at: str) -> str:
    """Return where the current elements of an input begin."""
    return f"reinterpret_cast<const {kind}*>({at}[{i}] + offset[{i}])"


def _grid(fold: int, kind: FoldKind) -> list[str]:
    """Return the lines that fold what is side by side in the blocks of a row."""
    combined = _COMBINE[kind].format("total", f"room{fold}[b * length + j]")
    simd = ["#pragma omp simd reduction(+ : total)"] if kind == "sum" else []
    return [
        f"if (length == 1 && !zeros) std::copy_n(room{fold}, number, grids[{fold}] + place);",
        "else for (int64_t b = 0; b < number; b++) {",
        "    if (zeros && zeros[place + b]) {",
        f"        grids[{fold}][place + b] = 0;",
        "        continue;",
        "    }",
        f"    T total = {_IDENTITY[kind]};",
        *simd,
        f"    for (int64_t j = 0; j < length; j++) total = {combined};",
        f"    grids[{fold}][place + b] = total;",
        "}",
    ]
