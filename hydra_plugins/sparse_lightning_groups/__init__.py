"""Makes the groups of sparse_lightning known to every Hydra application, as `sparse_lightning/<group>`."""
