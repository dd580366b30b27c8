"""Add the groups of sparse_lightning to every Hydra application, as `sparse_lightning/<group>`."""
