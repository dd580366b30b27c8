"""block_fill: one call zeroes the pruned blocks of many tensors, as the fill of each block does."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from fill_cases import bits, combine, filled
from hypothesis import given
from hypothesis import strategies as st

from sparse_lightning import BlockSpec, Layout
from sparse_lightning.kernels.block_fill import BlockFill, native
from sparse_lightning.kernels.block_fill.windows import window
from sparse_lightning.kernels.native import FOLDER, cache_folder, library

needs_compiler = pytest.mark.skipif(not native.is_available(), reason="needs a C++ compiler on x86 Linux")
CASES = st.lists(filled(), min_size=1, max_size=4).map(combine)


def pointers(tensors) -> list[int]:
    """The addresses of tensors."""
    return [tensor.data_ptr() for tensor in tensors]


def check(tables, case) -> None:
    tensors, windows, mask, wanted = case
    tables(windows, tensors).fill(tensors, pointers(tensors), mask)
    for tensor, after in zip(tensors, wanted, strict=True):
        assert torch.equal(bits(tensor), after)


@needs_compiler
@given(CASES, st.integers(1, 3), st.booleans(), st.sampled_from([8, 64, 1 << 16]))
def test_the_kernel_fills_what_the_reference_fills(case, threads, streams, row):
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "SMALL", 0)
        patch.setattr(native, "LARGE", 0 if streams else 1 << 40)
        patch.setattr(native, "ROW", row)
        torch.set_num_threads(threads)
        try:
            check(BlockFill, case)
        finally:
            torch.set_num_threads(before)


@given(CASES)
def test_without_a_compiler_torch_fills_the_same(case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "is_available", lambda: False)
        check(BlockFill, case)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.complex128])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 16, 70])
def test_elements_of_any_size_are_filled(dtype, length):
    values = torch.randint(1, 100, (6, 5, length)).to(dtype)
    mask, wanted = torch.rand(6, 5) < 0.5, values.clone()
    wanted[mask] = 0
    here = window(0, Layout((6, 1, 5, length), (5 * length, 5 * length, length, 1)), Layout((6, 5)), (0, 1))
    BlockFill([here], [values]).fill([values], pointers([values]), mask.flatten())
    assert torch.equal(values, wanted)


@needs_compiler
@given(
    dtype=st.sampled_from([torch.int8, torch.bfloat16, torch.float32, torch.float64]),
    length=st.sampled_from([1, 2, 3, 4, 8]),
    columns=st.integers(1, 70),
    data=st.data(),
)
def test_a_few_pruned_columns_are_filled_row_by_row(dtype, length, columns, data):
    """Matrices one after the other, each with its own columns: a row knows those of the row before, or finds them."""
    matrices, rows = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    few = st.sets(st.integers(0, columns - 1), max_size=max(1, columns // 6))
    mask = torch.zeros(matrices, columns, dtype=torch.bool)
    for i in range(matrices):
        mask[i, sorted(data.draw(few))] = True
    values = torch.randint(1, 100, (matrices, rows, columns, length)).to(dtype)
    wanted = values.clone()
    wanted[mask.unsqueeze(1).expand(-1, rows, -1)] = 0
    strides = (rows * columns * length, 0, 0, columns * length, length, 1)
    here = window(
        0, Layout((matrices, 1, 1, rows, columns, length), strides), Layout((matrices, 1, columns)), (0, 1, 2)
    )
    threads = data.draw(st.integers(1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "SMALL", 0 if threads > 1 else native.SMALL)
        BlockFill([here], [values]).fill([values], pointers([values]), mask.flatten())
    assert torch.equal(values, wanted)


def many(n=6):
    """Parameters of several shapes and dtypes with a spec each, their table, and a mask."""
    dtypes = [torch.float32, torch.bfloat16]
    weights = [torch.rand(8, 8 * (i % 3 + 1)).add(1).to(dtypes[i % 2]) for i in range(n)]
    params = [torch.nn.Parameter(weight) for weight in weights]
    specs = [BlockSpec(param, (4, 4)) for param in params]
    windows, start = [], 0
    for i, spec in enumerate(specs):
        windows += spec.part().fill_windows(i, Layout(spec.grid_shape, None, start))
        start += spec.numblk()
    return params, BlockFill(windows, params), torch.rand(start) < 0.5, windows


@pytest.mark.parametrize("compiler", [pytest.param(True, marks=needs_compiler), False])
def test_missing_tensors_are_passed_over_and_others_of_the_same_strides_filled(compiler, monkeypatch):
    monkeypatch.setattr(native, "is_available", lambda: compiler)
    params, table, mask, _ = many()
    copies = [param.detach().clone() for param in params]
    table.fill(params, pointers(params), mask)
    chosen = [None if i % 2 else copy for i, copy in enumerate(copies)]
    table.fill_some(chosen, mask)
    for i, (param, copy) in enumerate(zip(params, copies, strict=True)):
        assert torch.equal(param, copy) == (i % 2 == 0)


@pytest.mark.parametrize("compiler", [pytest.param(True, marks=needs_compiler), False])
def test_autograd_is_notified_of_every_tensor(compiler, monkeypatch):
    monkeypatch.setattr(native, "is_available", lambda: compiler)
    params, table, _, _ = many()
    for param in params:
        loss = param.square().sum()
        table.fill(params, pointers(params), torch.ones(1000, dtype=torch.bool))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_inference_tensors_are_filled_without_a_version():
    with torch.inference_mode():
        weight = torch.ones(4, 4)
    windows = BlockSpec(weight, (2, 2)).part().fill_windows(0, Layout((2, 2)))
    mask = torch.tensor([True, False, False, True])
    with torch.inference_mode():
        BlockFill(windows, [weight]).fill([weight], pointers([weight]), mask)
        assert weight.sum() == 8


@needs_compiler
def test_a_compiler_that_fails_is_reported(monkeypatch, tmp_path):
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho no such option >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    library.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"could not build the kernel block_fill: .*no such option"):
            assert library(native.SOURCE) is None
    finally:
        library.cache_clear()


@pytest.fixture
def source(tmp_path):
    """A kernel that is compiled in a moment: how it is built and kept is the same for all."""
    file = tmp_path / "twice" / "native.cpp"
    file.parent.mkdir()
    file.write_text('extern "C" int twice(int number) { return 2 * number; }\n')
    return file


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    """A folder without libraries, and a process that has loaded none."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    library.cache_clear()
    yield tmp_path / "cache"
    library.cache_clear()


def counting_compiler(tmp_path) -> str:
    """A compiler that notes each build."""
    script = tmp_path / "g++"
    notes = f'case "$*" in *-shared*) echo build >> {tmp_path}/builds;; esac'
    script.write_text(f'#!/bin/sh\n{notes}\nexec env -u CXX g++ "$@"\n')
    script.chmod(0o755)
    return str(script)


def _load(source: Path, folder: str, compiler: str) -> None:
    os.environ |= {FOLDER: folder, "CXX": compiler}
    library.cache_clear()
    assert library(source).twice(21) == 42


@needs_compiler
def test_processes_that_start_together_build_once_and_later_ones_not_at_all(source, empty_cache, tmp_path):
    compiler = counting_compiler(tmp_path)
    context = multiprocessing.get_context("fork")
    for _ in range(2):
        started = [context.Process(target=_load, args=(source, str(empty_cache), compiler)) for _ in range(4)]
        for process in started:
            process.start()
        for process in started:
            process.join()
            assert process.exitcode == 0
    assert (tmp_path / "builds").read_text().splitlines() == ["build"]
    assert [file.suffix for file in empty_cache.iterdir() if file.name != "lock"] == [".so"]


@needs_compiler
def test_what_machine_code_depends_on_names_the_library(source, empty_cache, monkeypatch, caplog):
    assert library(source).twice(21) == 42
    assert "building the CPU kernel twice, once on this machine" in caplog.text
    library.cache_clear()
    monkeypatch.setattr("sparse_lightning.kernels.native.OPTIONS", ("-O1", "-fopenmp", "-shared", "-fPIC"))
    assert library(source).twice(21) == 42
    assert len(list(empty_cache.glob("*.so"))) == 2


@needs_compiler
@pytest.mark.parametrize(
    "size", [pytest.param(0, marks=pytest.mark.exhaustive), 100, pytest.param(5000, marks=pytest.mark.exhaustive)]
)
def test_a_library_that_was_cut_short_is_built_again(source, empty_cache, size):
    assert library(source).twice(21) == 42
    [built] = empty_cache.glob("*.so")
    content = built.read_bytes()
    built.unlink()  # this process has it loaded
    built.write_bytes(content[:size])
    library.cache_clear()
    assert library(source).twice(21) == 42
    [again] = empty_cache.glob("*.so")
    assert again.stat().st_size > size


@needs_compiler
def test_a_folder_that_cannot_be_written_is_no_obstacle(source, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv(FOLDER, str(tmp_path / "file"))
    library.cache_clear()
    try:
        assert library(source).twice(21) == 42
    finally:
        library.cache_clear()


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "sparse_lightning"
    monkeypatch.setenv(FOLDER, str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
