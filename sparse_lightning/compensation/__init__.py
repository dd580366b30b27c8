"""Compensation: change the kept weights of a layer so that its outputs stay close to those before pruning."""

from sparse_lightning.compensation.gram import GramMatrices
from sparse_lightning.compensation.refit import Compensation, Refit

__all__ = ["Compensation", "GramMatrices", "Refit"]
