"""Masks in TensorBoard: a small picture of each at every update, and the page of all at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from sparse_lightning.report.mask_images import enlarged, evenly, mask_image
from sparse_lightning.report.mask_page import COLOURS, MOST, draw_masks
from sparse_lightning.report.page import pixels


def show_masks(loggers: Iterable[TensorBoardLogger], masks: Mapping[str, Tensor], step: int) -> None:
    """Add a picture of each mask, of 24 where there are more: TensorBoard lets one go through the steps.

    Args:
        loggers: where to.
        masks: by name, True = pruned.
        step: the optimizer steps that were made.
    """
    for logger in loggers:
        for name, mask in evenly(list(masks.items()), MOST):
            if mask.numel():
                coloured = COLOURS(np.nan_to_num(enlarged(mask_image(mask))))[..., :3]
                logger.experiment.add_image(f"masks/{name}", coloured, step, dataformats="HWC")


def show_page(loggers: Iterable[TensorBoardLogger], masks: Mapping[str, Tensor], step: int) -> None:
    """Add the page of all masks."""
    for logger in loggers:
        logger.experiment.add_image("masks", pixels(draw_masks(masks)), step, dataformats="HWC")
