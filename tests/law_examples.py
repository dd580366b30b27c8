"""How many random examples the property tests draw: few in `make test`, many in `make test-exhaustive`."""

from __future__ import annotations

import os

USUAL = 50
"""The examples that laws state their own number for."""

EXAMPLES = int(os.environ.get("EXAMPLES", "35"))
"""Examples of a law; the environment variable EXAMPLES sets another number."""


def examples(usual: int) -> int:
    """Return the examples of a law that takes long, `usual` by default, in proportion to EXAMPLES."""
    return max(1, usual * EXAMPLES // USUAL)
