"""MaskedProduct: a LoRA adapter whose product is zero wherever its base weight is."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import linear


class MaskedProduct:
    """What PEFT calls a variant of LoRA: the forward pass and the merge of an adapter of one layer.

    The product `B·A` is set to zero where the base weight is zero, in the forward pass as in the merge. It costs a
    product of the size of the weight, and a second product with the input. PEFT keeps variants beside the modules:
    classes, parameters and keys of the model stay as they are.
    """

    def supports_lora_conversion(self) -> bool:
        """A masked product has a higher rank than its adapter."""
        return False

    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        """Do nothing: the parameters are those of plain LoRA."""

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        """Return the output of the base layer plus that of the masked product."""
        weight, up = module.get_base_layer().weight, module.lora_B[active_adapter]
        product = _product(module, active_adapter, weight)
        product = product.T if module.fan_in_fan_out else product
        bias = None if up.bias is None else up.bias * module.scaling[active_adapter]
        return result + linear(module.lora_dropout[active_adapter](x), product, bias)

    @staticmethod
    def merge_safe(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        """Return the weight with the product added."""
        return orig_weight + _product(module, active_adapter, orig_weight).to(orig_weight.dtype)

    @staticmethod
    def merge_unsafe(module: Any, active_adapter: str, orig_weight: Tensor) -> None:
        """Add the product to the weight, in place."""
        orig_weight.data += _product(module, active_adapter, orig_weight).to(orig_weight.dtype)

    @staticmethod
    def unmerge(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        """Return the weight with the product subtracted."""
        return orig_weight.data - _product(module, active_adapter, orig_weight).to(orig_weight.dtype)


def _product(module: Any, adapter: str, weight: Tensor) -> Tensor:
    """Return the scaled product in the shape of the weight, zero where the weight is."""
    product: Tensor = (module.lora_B[adapter].weight @ module.lora_A[adapter].weight) * module.scaling[adapter]
    return (product.T if module.fan_in_fan_out else product).masked_fill(weight.detach() == 0, 0.0)
