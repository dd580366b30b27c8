"""Private names of torch: a test by name for each, which fails if torch changes it."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_lightning.compat import torch as compat


def test_get_current_dispatch_mode():
    assert not compat.has_dispatch_mode()
    with TorchDispatchMode():
        assert compat.has_dispatch_mode(), "torch.utils._python_dispatch._get_current_dispatch_mode has changed"
    assert not compat.has_dispatch_mode()


def test_cdata():
    weight = nn.Parameter(torch.zeros(2))
    before = compat.descriptors([weight])
    weight.data = torch.zeros(3)
    assert compat.descriptors([weight]) == before, "Tensor._cdata has changed: data keeps the description of a tensor"
    torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros(2)))
    assert compat.descriptors([weight]) != before, "Tensor._cdata or swap_tensors has changed"


@pytest.mark.parametrize("register", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_module_hooks(register):
    layer = nn.Linear(2, 2)
    assert not compat.has_hooks(layer)
    handle = getattr(layer, f"register_{register}")(lambda *args: None)
    assert compat.has_hooks(layer), "nn.Module keeps its hooks in other attributes"
    handle.remove()
    assert not compat.has_hooks(layer)


def test_dynamo_config_and_fail_on_recompile_limit_hit():
    names = "torch._dynamo.config.recompile_limit or torch._dynamo.exc.FailOnRecompileLimitHit has changed"

    def double(x):
        return x * 2

    compiled = torch.compile(double, backend="eager", dynamic=False, fullgraph=True)
    with compat.recompile_limit(2):
        for n in (2, 3):
            assert torch.equal(compiled(torch.ones(n)), torch.full((n,), 2.0))
        with pytest.raises(compat.recompile_limit_error()):
            pytest.fail(f"{names}: {compiled(torch.ones(4))} was compiled beyond the limit")
    with compat.recompile_limit(3):
        assert torch.equal(compiled(torch.ones(4)), torch.full((4,), 2.0)), names


def test_compute_local_shape_and_global_offset():
    from torch.distributed.tensor import Replicate, Shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        for placement in (Shard(0), Shard(1), Replicate()):
            found = compat.local_shape_and_offset((4, 6), mesh, (placement,))
            assert found == ((4, 6), (0, 0)), "compute_local_shape_and_global_offset has changed"
    finally:
        torch.distributed.destroy_process_group()


def test_optimizer_step_pre_hooks_and_post_hooks():
    called = []
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    compat.without_step_hooks(copy.copy(optimizer)).step()
    assert not called, "Optimizer._optimizer_step_pre_hooks or _optimizer_step_post_hooks has changed"
    optimizer.step()
    assert called == ["pre", "post"]
    hooks = [name for name, held in vars(optimizer).items() if isinstance(held, dict) and "hooks" in name]
    assert hooks, "Optimizer has no attributes with hooks any more"
    assert all(map(compat.is_hooks, hooks)), "attributes with hooks do not begin with _optimizer_ any more"


def test_flat_parameter_and_fsdp_flattened():
    from torch.distributed.fsdp import _flat_param

    assert "_fsdp_flattened" in inspect.getsource(_flat_param), "FSDP1 no longer sets _fsdp_flattened"
    flat = nn.Parameter(torch.ones(4)).as_subclass(_flat_param.FlatParameter)
    view = nn.Parameter(torch.ones(2))
    view._fsdp_flattened = True
    assert compat.is_fsdp1_flattened(flat), "torch.distributed.fsdp._flat_param.FlatParameter has changed"
    assert compat.is_fsdp1_flattened(view)
    assert not compat.is_fsdp1_flattened(nn.Parameter(torch.ones(2)))


def test_local_tensor():
    from torch.distributed.tensor import DTensor

    assert inspect.getattr_static(DTensor, "__slots__") is not None
    assert "_local_tensor" in DTensor.__slots__, "DTensor._local_tensor has changed"


def test_foreach_mul():
    tensors = [torch.ones(2), torch.full((2, 2), 3, dtype=torch.int32)]
    compat.multiply_all_(tensors, [torch.tensor([2.0, 0.0]), torch.tensor([[1], [0]], dtype=torch.int32)])
    assert [x.tolist() for x in tensors] == [[2, 0], [[3, 3], [0, 0]]], "torch._foreach_mul_ has changed"


def test_version():
    weight = nn.Parameter(torch.ones(2))
    before = compat.version(weight)
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=0.1).step()
    assert compat.version(weight) == before + 1, "Tensor._version has changed, or optimizers do not change it"
    with torch.inference_mode():
        assert compat.version(torch.ones(2)) == 0


def test_torch_ops_op_overload_has_a_schema_that_says_what_it_writes():
    assert compat.is_operation(torch.ops.aten.relu.default)
    assert not compat.is_operation(torch.relu)
    assert compat.writes_in_place(torch.ops.aten.relu_.default)
    assert not compat.writes_in_place(torch.ops.aten.relu.default)


def test_torch_utils_pytree_maps_and_lists_leaves():
    tree = (1, {"a": [2, 3]})
    assert compat.map_leaves(lambda x: 2 * x, tree) == (2, {"a": [4, 6]})
    assert compat.leaves(tree) == [1, 2, 3]


def test_module_keeps_hooks_submodules_parameters_and_buffers_in_these_attributes():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.register_forward_hook(lambda *_: None)
    copied = compat.shallow_copy(model, lambda hook: False)
    compat.fill_copy(copied, model, lambda child: compat.shallow_copy(child, bool), torch.clone)
    assert (len(copied._forward_hooks), len(model._forward_hooks)) == (0, 1)
    assert copied[0] is not model[0]
    batch_norm = compat.shallow_copy(model[1], bool)
    compat.fill_copy(batch_norm, model[1], lambda child: child, torch.clone)
    assert batch_norm.running_var is not model[1].running_var
    assert batch_norm.weight is not model[1].weight


def test_parameters_and_modules_of_a_module():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    found = compat.slots(model, {id(model[1][0].bias)})
    assert [key for _, key in found] == ["1", "0", "bias"]
    assert [holder[key] for holder, key in found] == [model[1], model[1][0], model[1][0].bias]
    model[1][0].bias = new = nn.Parameter(torch.ones(2))
    assert found[-1][0]["bias"] is new, "the dict is live"


def test_fsdp_state_lists_the_parameters_that_it_puts_in_place():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
        sharded = model.weight
        model(torch.ones(1, 2))
        assert model.weight is not sharded
        found = compat.put_in_place_by_fsdp(model)
        assert found[id(model.weight)] is sharded, "FSDPModule._get_fsdp_state or its parameters have changed"
    finally:
        torch.distributed.destroy_process_group()


def test_orig_mod():
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    assert compat.uncompiled(compiled) is model, "OptimizedModule._orig_mod has changed"
    assert compat.uncompiled(model) is model


def test_optimizer_step_post_hooks():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert compat.step_hooks(optimizer) == []
    optimizer.register_step_post_hook(print)
    assert compat.step_hooks(optimizer) == [print], "Optimizer._optimizer_step_post_hooks has changed"


def test_op():
    add = compat.builtin_of(torch.ops.aten.add.Tensor)
    assert torch.equal(add(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0)), "OpOverload._op has changed"


def test_compiled_call_impl():
    layer = nn.Linear(2, 2)
    assert not compat.is_compiled(layer)
    layer.compile(backend="eager")
    assert compat.is_compiled(layer), "Module._compiled_call_impl has changed"
    assert not compat.is_compiled(compat.shallow_copy(layer, bool)), "a copy for tracing is not compiled"


def test_torchdynamo_orig_callable():
    layer = nn.Linear(2, 2)
    forward = layer.forward
    layer.forward = torch.compile(forward, backend="eager")
    assert compat.uncompiled_function(layer.forward) == forward, "_torchdynamo_orig_callable has changed"
    assert compat.uncompiled_function(forward) == forward
    assert compat.is_compiled(layer)
