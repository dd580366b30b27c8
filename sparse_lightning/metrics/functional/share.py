"""The share that one count has in another."""

from __future__ import annotations

import torch
from torch import Tensor


def share(part: Tensor, whole: Tensor, of_nothing: float = 0.0) -> Tensor:
    """`part / whole`, a scalar in fp32 whatever the default dtype is; `of_nothing` where the whole is 0.

    Example:
        >>> share(torch.tensor(1), torch.tensor(4)), share(torch.tensor(0), torch.tensor(0), of_nothing=1.0)
        (tensor(0.2500), tensor(1.))
    """
    return torch.where(whole > 0, part.float() / whole.float(), of_nothing)
