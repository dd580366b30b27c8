"""prune: prune a trained model in one call, layer by layer, from a few batches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from tqdm import tqdm

from sparse_lightning.blocks.shards import is_rank_zero
from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.compensation import Compensation, GramMatrices
from sparse_lightning.compensation.removal import DAMP, removal_errors
from sparse_lightning.compensation.weight_blocks import check_read, compensate, read_weights
from sparse_lightning.engine.attached import TakenUp
from sparse_lightning.engine.calibration import Calibration, Step
from sparse_lightning.engine.defaults import default_criterion
from sparse_lightning.engine.masked_scope import check_has_values
from sparse_lightning.engine.ranks import agree
from sparse_lightning.engine.short_forms import as_compensation, as_criterion
from sparse_lightning.errors import FlowError, PatternError, SparseLightningError, SparsityError
from sparse_lightning.flow import Criterion, InputNorms, Scorer, Sources
from sparse_lightning.patterns import Attachment, Patterns
from sparse_lightning.patterns.adapters import AdapterWatch
from sparse_lightning.patterns.claims import resolve_in
from sparse_lightning.patterns.names import Names
from sparse_lightning.schedules.schedule import is_number


def prune(
    model: nn.Module,
    patterns: Patterns,
    sparsity: float,
    batches: Iterable[Any] = (),
    criterion: Criterion | str | None = None,
    compensation: Compensation | None = None,
    step: Step | None = None,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Tensor]:
    """Prune a trained model once, and return the masks.

    No optimizer and no Trainer are needed. Layers are pruned in the order in which the model calls them: the inputs by
    which a layer is scored and compensated come from the layers that are already pruned. For each scope, all batches
    run through the model once, in evaluation mode, unless neither criterion nor compensation reads inputs. To train
    the model after it, pass the masks to `SparsityCallback(patterns, Constant(sparsity), masks=masks)`.

    With several processes, as under FSDP2, each passes its own batches, and all get the same masks. A Sparsifier that
    is attached to the model takes up the masks, and holds them from then on; what it has pruned before stays pruned.

    Args:
        model: is changed in place: pruned blocks become zero.
        patterns: which parameters are divided into which blocks.
        sparsity: the fraction of blocks to prune in each scope; N:M patterns have their own.
        batches: what the model runs on, such as a DataLoader or a list of batches; a few hundred samples are usual.
        criterion: scores the blocks, an object or its name; None for `Wanda()`, or `Magnitude()` if the inputs of a
            layer cannot be observed.
        compensation: changes the kept weights, such as `Refit()`; None leaves them as they are.
        step: runs the model on a batch, and returns the loss if the criterion reads gradients. None calls the model,
            with a mapping as keywords and otherwise with the batch or its first entry; of a LightningModule it calls
            `training_step`, which gets the batch as the DataLoader makes it.
        seed: of random scores.
        progress: whether to show a progress bar.

    Returns:
        The mask of each grid of blocks, by name; True = pruned.

    Example:
        >>> import torch
        >>> from sparse_lightning import Neurons, Refit
        >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> batches = [torch.randn(32, 4) for _ in range(4)]
        >>> masks = prune(mlp, [Neurons("0", "2")], 0.5, batches, compensation=Refit(), progress=False)
        >>> int(masks["0 (neurons)"].sum()), int((mlp[2].weight == 0).all(dim=0).sum())
        (4, 4)
    """
    if not is_number(sparsity) or not 0 <= sparsity <= 1:
        raise SparsityError(f"sparsity={sparsity!r} is out of range: pass a fraction from 0 to 1")
    names = Names(model)
    found = resolve_in(patterns, names)
    if not found:
        raise PatternError("no patterns were passed, so that nothing would be pruned: pass one, such as Blocks()")
    held = TakenUp(found)
    AdapterWatch(found, names)  # from now on, adapters keep what is pruned at zero
    as_compensation(compensation)
    scores = _default(found, model) if criterion is None else as_criterion(criterion)
    run = _OneCall(model, Calibration(model, batches, step), scores, compensation, seed)
    run.check(found)
    masks: dict[str, Tensor] = {}
    try:
        for each in tqdm(run.ordered(found), desc="prune", unit="scope", disable=not (progress and is_rank_zero())):
            masks |= run.prune(each, sparsity if each.final is None else each.final, held.pruned(each))
    except BaseException:
        _keep_pruned(masks, held)
        raise
    held.take_up(masks, sparsity)
    return {name: masks[name] for each in found for name in each.scope.named_blocks(each.name)}


def _keep_pruned(masks: Mapping[str, Tensor], held: TakenUp) -> None:
    """Let Sparsifiers hold what an interrupted call has pruned, and warn of it."""
    if masks:
        held.take_up(masks, sparsity=0.0)  # below that of the call: an update that is due is still to be made
        warnings.warn(
            f"prune was interrupted when {', '.join(masks)} {'was' if len(masks) == 1 else 'were'} already pruned: "
            "load the weights of the model again, or call prune again, which prunes the rest",
            stacklevel=3,
        )


def check_prune(
    model: nn.Module, patterns: Patterns, criterion: Criterion | None, compensation: Compensation | None
) -> None:
    """Raise an error if `prune` could not prune a model by these parts, before there are batches to run it on."""
    found = resolve_in(patterns, Names(model))
    scores = _default(found, model) if criterion is None else criterion
    _OneCall(model, Calibration(model, ()), scores, compensation, seed=0).check(found)


def _default(found: Sequence[Attachment], model: nn.Module) -> Criterion:
    """Return Wanda where the inputs of all layers are observed: what N:M patterns have as their default."""
    as_nm = [replace(each, final=0.5) for each in found]
    return default_criterion(as_nm, model)


class _OneCall:
    """What the scopes of one call share."""

    def __init__(
        self,
        model: nn.Module,
        calibration: Calibration,
        criterion: Criterion,
        compensation: Compensation | None,
        seed: int,
    ) -> None:
        self._model, self._calibration = model, calibration
        self._criterion, self._compensation, self._seed = criterion, compensation, seed
        self._names = {id(param): name for name, param in reversed(Names(model).parameters.items())}

    def check(self, found: Sequence[Attachment]) -> None:
        """Raise an error if scores or compensation need something of a scope that no batch can give."""
        blocks = [block for each in found for block in each.scope.blocks()]
        check_read(self._compensation, read_weights(blocks, self._model, self._names), self._model)
        for each in found:
            with self._observed(each):
                pass

    def ordered(self, found: Sequence[Attachment]) -> list[Attachment]:
        """Return scopes in the order in which the model calls the last layer of each."""
        for each in found:
            check_has_values(each.name, each.scope.unique_params())
        reads = self._scorer(found[0]).program.names - {"weight", "random"}
        if self._compensation is None and not reads:
            return list(found)  # no layer depends on the others
        # Looked up now: in a forward pass, the parameters of a sharded module are other tensors.
        own = {module: [id(p) for p in module.parameters(recurse=False)] for module in self._model.modules()}
        calls: dict[int, int] = {}
        hooks = [module.register_forward_pre_hook(partial(_note, calls, ids)) for module, ids in own.items()]
        try:
            self._calibration.run_once()
        finally:
            for hook in hooks:
                hook.remove()
        last = {id(each): max(calls.get(id(p), -1) for p in each.scope.unique_params()) for each in found}
        return sorted(found, key=lambda each: last[id(each)])

    def _scorer(self, attachment: Attachment) -> Scorer:
        scorer = Scorer(self._criterion, attachment.scope.unique_params()[0].device, seed=self._seed)
        scorer.attach(attachment.name, attachment.scope)
        return scorer

    def prune(self, attachment: Attachment, sparsity: float, pruned: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Score, choose, compensate and prune the blocks of one scope; return their masks.

        Args:
            attachment: the scope.
            sparsity: the fraction of its blocks to prune.
            pruned: the masks that it has, by name; empty if nothing holds masks of it.
        """
        scope, blocks = attachment.scope, attachment.scope.named_blocks(attachment.name)
        with self._observed(attachment) as (scorer, sources, grams):
            scores = self._scores(scorer, sources, scope.unique_params())
            _check_finite(attachment.name, scores)
            for block, before in ((blocks[name], mask) for name, mask in pruned.items()):
                scores[block] = scores[block].masked_fill(before, -math.inf)
            chosen = scope.select(scores, scope.sparsity_to_nnz(sparsity))
            assert isinstance(chosen, Mapping), "a mapping of scores gives a mapping of masks"
            masks = {name: agree(chosen[block]) for name, block in blocks.items()}
            masks |= {name: masks[name] | before for name, before in pruned.items()}
            if self._compensation is not None and grams is not None:
                compensate(self._compensation, blocks, masks, grams)
        for name, block in blocks.items():
            block.apply_mask(masks[name])
        return masks

    @contextmanager
    def _observed(self, attachment: Attachment) -> Iterator[tuple[Scorer, Sources, GramMatrices | None]]:
        """Observe the inputs of the layers of one scope that scores and compensation need."""
        scorer, params = self._scorer(attachment), attachment.scope.unique_params()
        names = scorer.program.names
        norms = InputNorms(self._model, params) if "input_norm" in names else None
        grams = None
        if self._compensation is not None or "removal_error" in names:
            grams = GramMatrices(self._model, read_weights(attachment.scope.blocks(), self._model, self._names))
        errors = None if grams is None else partial(removal_errors, grams=grams, damp=DAMP)
        sources = Sources(input_norms={} if norms is None else norms, removal_error=errors)
        try:
            scorer.check(sources)
            yield scorer, sources, grams
        finally:
            for observer in [observer for observer in (norms, grams) if observer is not None]:
                observer.close()

    def _scores(self, scorer: Scorer, sources: Sources, params: Sequence[Tensor]) -> dict[SparseBlock, Tensor]:
        """Run the batches, with gradients if the criterion reads them, and return the scores."""
        names = scorer.program.names
        if "grad" in names:
            return self._gradient_scores(scorer, sources, params)
        if self._compensation is not None or names & {"input_norm", "removal_error"}:
            self._calibration.run()
        return scorer.score(sources)

    def _gradient_scores(self, scorer: Scorer, sources: Sources, params: Sequence[Tensor]) -> dict[SparseBlock, Tensor]:
        """Score by the mean of the gradients; a criterion with state observes the gradients of each batch."""
        grads: dict[Tensor, Tensor] = {}
        for count, _ in enumerate(self._calibration.losses()):
            if grads and self._criterion.states:
                scorer.observe(replace(sources, grads=grads))
            self._check_gradients(params)
            before = {} if self._criterion.states else grads
            grads = {p: before[p].lerp(p.grad, 1 / (count + 1)) if p in before else p.grad.clone() for p in params}  # type: ignore[union-attr, arg-type]
        return scorer.score(replace(sources, grads=grads))

    def _check_gradients(self, params: Iterable[Tensor]) -> None:
        for param in params:
            if param.grad is None:
                raise FlowError(
                    f"{self._names[id(param)]} has no gradient: it is frozen, or the loss does not depend on it. "
                    "Exclude it from the patterns, or pass a criterion without gradients, such as Wanda()"
                )


def _note(calls: dict[int, int], ids: Sequence[int], module: nn.Module, inputs: Any) -> None:
    """Number the parameters of a module by the order of calls."""
    calls |= dict.fromkeys(ids, len(calls))


def _check_finite(name: str, scores: Mapping[SparseBlock, Tensor]) -> None:
    if not all(bool(grid.isfinite().all()) for grid in scores.values()):
        raise SparseLightningError(
            f"the scores of {name} are not finite: look for inf and NaN in its weights and in the batches"
        )
