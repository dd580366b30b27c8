"""How many random examples the property tests draw: few in `make test`, many in `make test-exhaustive`."""

from __future__ import annotations

import os

USUAL = 50
"""Examples of a law by default; the environment variable EXAMPLES sets another number."""

EXAMPLES = int(os.environ.get("EXAMPLES", USUAL))


def examples(usual: int) -> int:
    """Return the examples of a law that takes long, `usual` by default, in proportion to EXAMPLES."""
    return max(1, usual * EXAMPLES // USUAL)
