"""The engine: a `Sparsifier` and what runs inside of it, with no Lightning."""
