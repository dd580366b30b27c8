"""The text of `--help`: what to do next, the recipes, the groups; and for one group what each option is for."""

from __future__ import annotations

import textwrap

from sparse_lightning.configuration import catalog
from sparse_lightning.nearest import did_you_mean

_FIRST = """\
sparse-lightning: train a model to structured sparsity. A recipe is a whole run; everything in it can be overridden.

  sparse-lightning                                     the default recipe, {default}: on a CPU, in about a minute
  sparse-lightning recipe=digits_rigl schedule.final=0.95        another recipe, and a value in it
  sparse-lightning criterion=taylor budget=global                other options of groups
  sparse-lightning ckpt_path=last                                go on with the newest run, after Ctrl-C or a kill
  sparse-lightning -m schedule.final=0.5,0.75,0.9 criterion=magnitude,taylor    a sweep: all combinations

A run prints a table, and leaves its config, checkpoints, metrics, masks and pictures in outputs/<recipe>/<time>.
"""

_LAST = """\
Also: seed=1  update_every=50  compare_dense=false  trainer.max_epochs=3  trainer.fast_dev_run=true
      --cfg job             print the composed configuration, and run nothing
      --config-dir FOLDER   your own options and recipes: FOLDER/recipe/mine.yaml, FOLDER/model/mine.yaml
      model._target_=my_pkg.MyModel trusted_targets=[my_pkg]     your own model; the same for data
      --hydra-help          what Hydra can do beside this
Begin with `sparse-lightning`, then look at sparsity.png in its folder.
"""


def guide() -> str:
    """The whole help, on two screens."""
    return "\n".join([_FIRST.format(default=catalog.default("recipe")), _recipes(), _groups(), _LAST])


def group_guide(group: str) -> str:
    """What each option of one group is for."""
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
    return "\n".join(
        ["Groups (GROUP=OPTION; `sparse-lightning --help GROUP` says what each option is for):", *lines, ""]
    )
