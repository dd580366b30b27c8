"""The text of `--help`: examples, recipes and groups; and for one group its options."""

from __future__ import annotations

import textwrap

from sparse_lightning.app import catalog
from sparse_lightning.errors import did_you_mean

_FIRST = """\
sparse-lightning: structured pruning and sparse training. A recipe is a whole run; every value in it can be overridden.

  sparse-lightning                                     the default recipe, {default}: on a CPU, in about a minute
  sparse-lightning recipe=digits_rigl schedule.final=0.95        another recipe, at a sparsity level of 95 %
  sparse-lightning criterion=taylor budget=global                other options of two groups
  sparse-lightning ckpt_path=last                                resume the newest run, after Ctrl-C or a kill
  sparse-lightning -m schedule.final=0.5,0.75,0.9 criterion=magnitude,taylor    a sweep: all combinations

A run prints a table, and writes its config, checkpoints, metrics, masks and plots to outputs/<recipe>/<time>.
"""

_LAST = """\
Also: seed=1  update_every=50  compare_dense=false  trainer.max_epochs=3  trainer.fast_dev_run=true
      --couplings           print the units of the model that can be removed, and why others cannot, without training
      --cfg job             print the composed configuration, without running it
      --config-dir FOLDER   add your own options and recipes: FOLDER/recipe/mine.yaml, FOLDER/model/mine.yaml
      model._target_=my_pkg.MyModel trusted_targets=[my_pkg]     your own model; the same for data
      --hydra-help          all flags of Hydra
To start: run `sparse-lightning`, then open sparsity.png in its folder.
"""


def guide() -> str:
    """Return the help."""
    return "\n".join([_FIRST.format(default=catalog.default("recipe")), _recipes(), _groups(), _LAST])


def group_guide(group: str) -> str:
    """Return the help of one group: its options and their purposes."""
    known = [*catalog.groups(), "recipe"]
    if group not in known:
        return f"there is no group {group!r}{did_you_mean(group, known)}"
    listed = catalog.options(group)
    chosen = catalog.default(group)
    width = max(map(len, listed))
    lines = [f"  {group}={name:<{width}}  {purpose}" for name, purpose in listed.items()]
    return "\n".join([f"{group}: {catalog.groups().get(group, 'a whole run')} (default: {chosen})", *lines])


def _recipes() -> str:
    recipes = catalog.options("recipe")
    width = max(map(len, recipes), default=0)
    lines = [f"  {name:<{width}}  {textwrap.shorten(line, 116 - width)}" for name, line in recipes.items()]
    return "\n".join(["Recipes (recipe=NAME):", *lines, ""])


def _groups() -> str:
    lines = []
    for group, purpose in catalog.groups().items():
        names = ", ".join(catalog.options(group))
        first = f"  {group:<10} {purpose}: "
        lines.append(textwrap.fill(first + names, 116, subsequent_indent=" " * 13, break_on_hyphens=False))
    return "\n".join(["Groups (GROUP=OPTION; `sparse-lightning --help GROUP` describes each option):", *lines, ""])
