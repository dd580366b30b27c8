"""nm_select at 4096×4096 on a CPU: 2:4 as a ratio to one write of the weights, and to a top-k with a scatter.

Results are checked first. Times are medians of interleaved rounds in this one run.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import torch
from interleaved import interleaved
from torch.profiler import ProfilerActivity, profile

from sparse_lightning.kernels.nm_select import nm_select, reference

SIZE, N, M = 4096, 2, 4


def by_topk(weight: torch.Tensor) -> torch.Tensor:
    """The mask of the usual code: the best of each group, scattered."""
    best = weight.view(-1, M).abs().topk(N).indices
    return torch.ones(weight.numel() // M, M, dtype=torch.bool).scatter_(1, best, False).view(weight.shape)


def check(weight: torch.Tensor, norms: torch.Tensor) -> None:
    """The mask is that of a top-k, as no two magnitudes of a group are equal; the weights are zero where it says."""
    for other in (None, norms):
        scored = weight if other is None else weight * other
        ours = weight.clone()
        mask = nm_select(ours, N, M, other)
        ties = scored.abs().view(-1, M).sort().values.diff(dim=-1).eq(0).any(-1)
        assert torch.equal(mask.view(-1, M)[~ties], by_topk(scored).view(-1, M)[~ties]), "the mask is not the top-k"
        assert torch.equal(ours, weight.masked_fill(mask, 0)), "the weights are not masked"
        wide = None if other is None else other.expand_as(weight)
        assert torch.equal(mask, reference.nm_select(weight.clone(), N, M, wide)), "the mask is not the reference's"


def scratch(weight: torch.Tensor) -> int:
    """The bytes that a selection makes beside the weights and the mask: the peak in numpy, in torch all together."""
    selected = weight.clone()
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        mask = nm_select(selected, N, M)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak + sum(max(0, event.self_cpu_memory_usage) for event in recorded.events()) - mask.nbytes


def main() -> None:
    """Check, measure, print."""
    torch.manual_seed(0)
    weight, other, norms = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE), torch.rand(SIZE)
    half = weight.bfloat16()
    check(weight, norms)
    extra = scratch(weight) / (weight.numel() * weight.element_size())

    actions: dict[str, Callable[[], object]] = {
        "zero_": other.zero_,
        "nm_select": lambda: nm_select(weight, N, M),
        "bf16": lambda: nm_select(half, N, M),
        "with norms": lambda: nm_select(weight, N, M, norms),
        "topk": lambda: by_topk(weight),
    }
    times = interleaved(actions)
    ours = times["nm_select"]
    print(f"{SIZE}×{SIZE} fp32, {N}:{M}, {torch.get_num_threads()} threads; zero_ {times['zero_'] * 1e3:.2f} ms")
    print(f"nm_select  {ours * 1e3:6.1f} ms {ours / times['zero_']:5.2f} × zero_  (at most 6)")
    print(f"top-k      {times['topk'] * 1e3:6.1f} ms {times['topk'] / ours:5.2f} × nm_select  (at least 10)")
    print(f"in bf16    {times['bf16'] / ours:5.2f} × nm_select, with norms {times['with norms'] / ours:5.2f} ×")
    print(f"scratch    {extra:.1%} of the weights  (at most 5 %)")


if __name__ == "__main__":
    main()
