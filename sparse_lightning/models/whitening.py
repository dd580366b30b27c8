"""Whitening filters: they decorrelate the pixels of small patches."""

from __future__ import annotations

import torch
from torch import Tensor


def whitening_filters(images: Tensor, size: int = 2, least: float = 1e-2) -> Tensor:
    """Return the principal components of all patches, each divided by its standard deviation.

    Args:
        images: `(n, channels, height, width)`.
        size: height and width of a patch.
        least: added to the variances, so that components of little variance are not amplified.

    Returns:
        Filters of a convolution, `(channels · size², channels, size, size)`.

    Example:
        >>> images = torch.randn(4, 3, 8, 8)
        >>> patches = torch.nn.functional.conv2d(images, whitening_filters(images, least=0.0))
        >>> torch.allclose(patches.transpose(0, 1).flatten(1).cov(correction=0), torch.eye(12), atol=0.05)
        True
    """
    channels = images.shape[1]
    patches = images.unfold(2, size, 1).unfold(3, size, 1).permute(0, 2, 3, 1, 4, 5).flatten(0, 2).flatten(1)
    variances, components = torch.linalg.eigh(patches.T.cov())
    filters: Tensor = components.T / (variances + least).sqrt()[:, None]
    return filters.flip(0).view(-1, channels, size, size)
