"""The ratio of two counts."""

from __future__ import annotations

import torch
from torch import Tensor


def fraction(part: Tensor, total: Tensor, if_empty: float = 0.0) -> Tensor:
    """Return `part / total` as an fp32 scalar, whatever the default dtype; `if_empty` if the total is 0.

    Example:
        >>> fraction(torch.tensor(1), torch.tensor(4)), fraction(torch.tensor(0), torch.tensor(0), if_empty=1.0)
        (tensor(0.2500), tensor(1.))
    """
    return torch.where(total > 0, part.float() / total.float(), if_empty)
