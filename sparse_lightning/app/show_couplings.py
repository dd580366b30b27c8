"""`--couplings`: print the units of a model that can be removed, without training."""

from __future__ import annotations

from sparse_lightning.app.checked import check_runs
from sparse_lightning.app.renamed_keys import accept_old_keys
from sparse_lightning.compat.hydra import argument_parser


def show_couplings(arguments: list[str]) -> str:
    """Return the tables of families and refusals of the model of each run that the arguments request."""
    options = argument_parser().parse_intermixed_args(arguments)
    checked = check_runs(accept_old_keys(options.overrides), options.config_dir, options.multirun)
    # From here on torch is needed.
    from sparse_lightning.app.factory import Factory
    from sparse_lightning.graph import couplings

    factories = [Factory(composed.plain("."), checked.trusted) for composed in checked.runs]
    return "\n\n".join(str(couplings(factory.model_and_data()[0])) for factory in factories)
