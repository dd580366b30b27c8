"""The specification layer at 4096×4096 fp32: masking and norms as ratios to one pass over the weights.

Results are checked first. Times are medians of interleaved rounds in this one run, so that what else the
machine does falls on both sides of a ratio.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from interleaved import DEVICE, interleaved, machine

from sparse_lightning import BlockSpec, View

SIZE, PRUNED = 4096, 0.75
BLOCKS = [(32, 32), (4, 4), (1, 4), (1, 1)]


def check(weight: torch.Tensor, mask: torch.Tensor, block: tuple[int, int]) -> None:
    """Masking and norms give what plain torch gives."""
    spec = BlockSpec(weight, block)
    wanted = weight.clone()
    wanted[mask.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)] = 0
    spec.apply_mask(mask)
    assert torch.equal(weight, wanted), f"apply_mask is wrong for blocks of {block}"
    norms = weight.view(SIZE // block[0], block[0], SIZE // block[1], block[1]).square().sum((1, 3)).sqrt()
    assert torch.allclose(spec.norms(), norms), f"norms are wrong for blocks of {block}"


def main() -> None:
    """Check, measure, print."""
    torch.manual_seed(0)
    weight, other = (torch.randn(SIZE, SIZE, device=DEVICE) for _ in range(2))
    masks = {(a, b): torch.rand(SIZE // a, SIZE // b, device=DEVICE) < PRUNED for a, b in BLOCKS}
    for block, mask in masks.items():
        check(weight.normal_(), mask, block)
    weight.normal_()
    specs = {block: BlockSpec(weight, block) for block in BLOCKS}

    actions: dict[str, Callable[[], object]] = {"zero_": other.zero_, "sum": other.sum}
    for block in BLOCKS:
        actions[f"apply_mask {block}"] = lambda b=block: specs[b].apply_mask(masks[b])
    actions["norms (32, 32)"] = specs[32, 32].norms
    times = interleaved(actions)

    print(f"{SIZE}×{SIZE} fp32, {PRUNED:.0%} pruned, {machine()}")
    print(f"zero_ {times['zero_'] * 1e3:.2f} ms, sum {times['sum'] * 1e3:.2f} ms")
    for block in BLOCKS:
        limit = 1.3 if block == (32, 32) else 2.5
        print(f"apply_mask {block!s:8} {times[f'apply_mask {block}'] / times['zero_']:5.2f} × zero_  (at most {limit})")
    print(f"norms      (32, 32) {times['norms (32, 32)'] / times['sum']:5.2f} × sum    (at most 6)")

    made = interleaved({"View": lambda: View(weight, (SIZE, SIZE), (1, SIZE)), "BlockSpec": lambda: specs[4, 4]}, 2000)
    made |= interleaved({"BlockSpec": lambda: BlockSpec(weight, (32, 32))}, 2000)
    print(f"making a View {made['View'] * 1e6:.0f} µs, a BlockSpec {made['BlockSpec'] * 1e6:.0f} µs")


if __name__ == "__main__":
    main()
