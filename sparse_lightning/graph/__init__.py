"""The traced model: which weights can be removed together, found and proven."""

from sparse_lightning.graph.call import Call, rule
from sparse_lightning.graph.couplings import Couplings, couplings
from sparse_lightning.graph.families import Family, Refusal, UnitSlices
from sparse_lightning.graph.removal import Removal
from sparse_lightning.graph.traced_value import TracedValue

__all__ = ["Call", "Couplings", "Family", "Refusal", "Removal", "TracedValue", "UnitSlices", "couplings", "rule"]
