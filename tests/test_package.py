"""The package as a user meets it: its names, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sparse_lightning


@pytest.mark.parametrize("name", sparse_lightning.__all__)
def test_every_public_name_is_what_it_says(name):
    for _ in range(2):
        thing = getattr(sparse_lightning, name)
        assert callable(thing), f"{name} became a module once it was imported"
        assert thing.__name__ == name
        assert thing.__doc__


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="BlockSpeck"):
        _ = sparse_lightning.BlockSpeck
    assert set(sparse_lightning.__all__) <= set(dir(sparse_lightning))


def test_importing_the_package_imports_no_torch():
    program = "import sys, sparse_lightning, sparse_lightning.layout; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
