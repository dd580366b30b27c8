"""What a configuration may never call, wherever it is named, and why."""

from __future__ import annotations

from collections.abc import Iterable

PACKAGES = ("sparse_lightning", "torch", "lightning", "torchmetrics")
"""The packages in which a `_target_` may lie."""

FUNCTIONS = ("sparse_lightning", "torch.nn", "torch.optim", "torchmetrics")
"""Where functions may be called too; elsewhere in these packages only classes."""

_PROGRAMS = "runs programs or changes files"
_CODE = "runs code that is given to it as data"
_PICKLE = "loads pickles or binaries, which can run any code"
_AROUND = "would make objects past the check of targets"

_REASONS = {
    _PROGRAMS: (
        "os posix nt posixpath ntpath subprocess shutil pty socket webbrowser tempfile pathlib io multiprocessing "
        "asyncio signal platform glob fileinput urllib http ftplib smtplib ssl zipfile tarfile site ensurepip pip venv "
        "torch.save torch.multiprocessing torch.distributed.run torch.distributed.launch torch.distributed.launcher "
        "torch.distributed.elastic torch.distributed.rpc torch.utils.collect_env torch.utils.bottleneck "
        "torch.utils.viz lightning.pytorch.strategies.launchers lightning.fabric.strategies.launchers"
    ),
    _CODE: (
        "builtins sys importlib runpy code codeop inspect types operator functools ast timeit trace pdb bdb cProfile "
        "profile doctest unittest pytest pkgutil zipimport gc atexit threading concurrent weakref copyreg "
        "torch.utils.benchmark torch.utils.cpp_extension torch.fx torch.library torch.testing torch.onnx "
        "torch.distributed.nn torch.utils.backend_registration torch.utils.checkpoint"
    ),
    _PICKLE: (
        "pickle cPickle dill cloudpickle joblib marshal shelve ctypes cffi numpy.load numpy.f2py torch.load "
        "torch.serialization torch.hub torch.jit torch.package torch.export torch.ops torch.classes torch.storage "
        "torch.utils.model_zoo torch.distributed.checkpoint lightning.fabric.utilities lightning.pytorch.utilities "
        "lightning.pytorch.core.saving"
    ),
    _AROUND: (
        "hydra omegaconf jsonargparse lightning.pytorch.cli lightning.fabric.cli sparse_lightning.cli "
        "sparse_lightning.configuration sparse_lightning.run sparse_lightning.demo"
    ),
}
_DANGERS = {name: reason for reason, names in _REASONS.items() for name in names.split()}
_LOADERS = ("load_from_checkpoint", "load_library", "load_url", "load_state_dict_from_url")


def danger_of(path: str) -> str | None:
    """Why a dotted name may not be called; None where nothing is known against it.

    Example:
        >>> danger_of("torch.hub.load")
        'torch.hub loads pickles or binaries, which can run any code'
        >>> danger_of("torch.optim.AdamW")
    """
    path = path.removeprefix("_") if path.partition(".")[0] in ("_pickle", "_ctypes", "_io", "_operator") else path
    found = next((name for name in _DANGERS if is_within(path, (name,))), None)
    if found is not None:
        return f"{found} {_DANGERS[found]}"
    last = path.rpartition(".")[2]
    return f"{last} {_PICKLE}" if last in _LOADERS else None


def is_within(path: str, prefixes: Iterable[str]) -> bool:
    """Whether a dotted name is one of the prefixes, or lies in one.

    Example:
        >>> is_within("torch.nn.Linear", ["torch"]), is_within("torch_evil.Linear", ["torch"])
        (True, False)
    """
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)
