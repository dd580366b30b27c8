"""Drawing: figures of which elements form which block and scope, and which blocks are pruned."""

from sparse_lightning.drawing.figure import COLOURS, PALETTE, colours_of, draw

__all__ = ["COLOURS", "PALETTE", "colours_of", "draw"]
