"""Masks in TensorBoard: an image of each at every update, and the figure of all at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from sparse_lightning.report.figures import pixels
from sparse_lightning.report.mask_figure import COLORMAP, MAX_MASKS, draw_masks
from sparse_lightning.report.mask_images import evenly_spaced, mask_image, upsampled


def log_masks(loggers: Iterable[TensorBoardLogger], masks: Mapping[str, Tensor], step: int) -> None:
    """Log an image of each mask, of at most 24.

    Args:
        loggers: the loggers.
        masks: masks by name, True = pruned.
        step: the number of optimizer steps.
    """
    for logger in loggers:
        for name, mask in evenly_spaced(list(masks.items()), MAX_MASKS):
            if mask.numel():
                coloured = COLORMAP(np.nan_to_num(upsampled(mask_image(mask))))[..., :3]
                logger.experiment.add_image(f"masks/{name}", coloured, step, dataformats="HWC")


def log_mask_figure(loggers: Iterable[TensorBoardLogger], masks: Mapping[str, Tensor], step: int) -> None:
    """Log the figure of all masks."""
    for logger in loggers:
        logger.experiment.add_image("masks", pixels(draw_masks(masks)), step, dataformats="HWC")
