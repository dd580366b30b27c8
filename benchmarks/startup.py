"""Time of `sparse-lightning --help`, relative to the imports that every run needs."""

from __future__ import annotations

import subprocess
import sys

from interleaved import ratios

LIMIT = 1.5
PROGRAMS = {
    "import hydra, lightning": ["-c", "import hydra, lightning"],
    "sparse-lightning --help": ["-m", "sparse_lightning", "--help"],
}


def call(name: str) -> str:
    return subprocess.run([sys.executable, *PROGRAMS[name]], check=True, capture_output=True, text=True).stdout


def main() -> None:
    assert "recipe=NAME" in call("sparse-lightning --help")
    actions = {name: lambda name=name: call(name) for name in PROGRAMS}
    base = "import hydra, lightning"
    for name, ratio in ratios(actions, base, rounds=3).items():
        print(f"{name:<26} {ratio:5.2f}")
        assert name == base or ratio < LIMIT, f"{name} takes {ratio:.2f} of the time of {base}: the limit is {LIMIT}"


if __name__ == "__main__":
    main()
