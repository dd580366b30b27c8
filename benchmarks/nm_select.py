"""nm_select at 4096×4096: 2:4 sparsity compared to one write of the weights, and to a top-k with a scatter.

Results are checked first. Times are medians of interleaved rounds in this one run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from interleaved import DEVICE, interleaved, machine, peak_on_gpu
from torch.profiler import ProfilerActivity, profile

from sparse_lightning.kernels.nm_select import nm_select, reference

SIZE, N, M = 4096, 2, 4


def by_topk(weight: torch.Tensor) -> torch.Tensor:
    """Return the mask by the usual code: the top k of each group, scattered."""
    best = weight.view(-1, M).abs().topk(N).indices
    mask = torch.ones(weight.numel() // M, M, dtype=torch.bool, device=weight.device)
    return mask.scatter_(1, best, False).view(weight.shape)


def check(weight: torch.Tensor, norms: torch.Tensor) -> None:
    """Check the mask against a top-k, except in groups with ties, and that exactly the masked weights are zero."""
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
    """Return the bytes that torch allocates for a selection in addition to the mask."""
    selected = weight.clone()
    if DEVICE.type == "cuda":
        before = torch.cuda.memory_allocated()
        return peak_on_gpu(lambda: nm_select(selected, N, M)) - before - weight.numel()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        mask = nm_select(selected, N, M)
    return sum(max(0, event.self_cpu_memory_usage) for event in recorded.events()) - mask.nbytes


def main() -> None:
    """Check, measure, print."""
    torch.manual_seed(0)
    weight, other = (torch.randn(SIZE, SIZE, device=DEVICE) for _ in range(2))
    norms = torch.rand(SIZE, device=DEVICE)
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
    print(f"{SIZE}×{SIZE} fp32, {N}:{M}, {machine()}; zero_ {times['zero_'] * 1e3:.2f} ms")
    print(f"nm_select  {ours * 1e3:6.1f} ms {ours / times['zero_']:5.2f} × zero_  (at most 6)")
    print(f"top-k      {times['topk'] * 1e3:6.1f} ms {times['topk'] / ours:5.2f} × nm_select  (at least 10)")
    print(f"in bf16    {times['bf16'] / ours:5.2f} × nm_select, with norms {times['with norms'] / ours:5.2f} ×")
    print(f"scratch    {extra:.1%} of the weights  (at most 5 %)")


if __name__ == "__main__":
    main()
