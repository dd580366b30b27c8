"""Measure this package beside the libraries that users would pick instead, and write docs/results/.

    make bench-peers                                        the full form: hours
    make bench-peers PEERS_ARGS=--short                     the short form: some ten minutes
    make bench-peers PEERS_ARGS="--questions cost --short"  one question

Every run is checked before it is reported: its sparsity is counted from the weights. Times are ratios of interleaved
rounds in one process; accuracies are means over seeds, and the spread is the highest minus the lowest.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

import catalog
import cost
import growth
import page
import quality
import tasks
import torch

QUESTIONS = ("cost", "quality", "encoder", "growth")
INTROS = {
    "cost": """# What training costs

A stack of linear layers, trained with AdamW on random inputs. `step / dense` is the time of a step that holds masks
over that of a dense step, `update in dense steps` what an update adds to such a step, `peak over dense` the peak memory
of a process over that of a dense one, `checkpoint / dense` the size of all that is needed to resume. Sparsity is 75 %,
and 50 % for 2:4 and units. Torch-Pruning removes units, so that its steps get cheaper; its update and that of
nvidia-modelopt is the first one.""",
    "quality": """# How good the model is

Accuracy at the same sparsity, steps, batches and seeds. All libraries follow our default ramp: cubic, from 10 to 70 %
of the run, in about 30 updates. For 2:4 ours is linear, and nvidia-modelopt, which has no ramp, prunes once at 40 %. A
library that cannot prune a pattern is left out of its table.""",
    "encoder": """# How good a fine-tuned encoder is

A pretrained sentence encoder that learns to classify short texts. Schedules are those of [quality](quality.md).""",
    "growth": """# How the cost grows

The time of a hold, which runs at every step, and of an update by `Magnitude`, at 75 % sparsity, beside a copy of all
weights in the same run: the memory speed of the machine. The last row is the exponent of a power law through the
rows.""",
}
"""How the page of each question begins."""


def main() -> None:
    """Answer the questions, and write a page for each."""
    chosen = arguments()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(chosen.threads)
    kinds, missing = catalog.peers()
    for question in sorted(chosen.questions, key=QUESTIONS.index):  # costs first: memory is that of forks
        start = time.perf_counter()
        tables, plots = answered(question, kinds, chosen)
        if tables:
            facts = page.facts(catalog.versions(kinds), (time.perf_counter() - start) / 60)
            absent = {**catalog.LEFT_OUT, **missing}
            facts += [f"Not measured: {'; '.join(f'{name} ({why})' for name, why in absent.items())}."]
            facts += ["This is the **short form**: few sizes, steps and seeds."] if chosen.short else []
            page.write(chosen.output / f"{question}.md", INTROS[question], tables, plots, [*facts, *chosen.note])


def answered(question: str, kinds: list, chosen: argparse.Namespace) -> tuple[list[page.Table], list[page.Plot]]:
    """Tables and plots of a question."""
    steps, seeds = chosen.steps or (200 if chosen.short else 2000), chosen.seeds or (2 if chosen.short else 5)
    if question == "cost":
        return cost.answer(kinds, chosen.short), []
    if question == "growth":
        return growth.answer(chosen.short), []
    if question == "quality":
        plans = quality.SHORT if chosen.short else quality.FULL
        return quality.answer(kinds, tasks.fashion(chosen.fashion), plans, steps, seeds)
    if chosen.encoder is None or chosen.texts is None:
        print("encoder: not measured, pass --encoder and --texts")
        return [], []
    return quality.answer(kinds, tasks.encoder(chosen.encoder, chosen.texts), quality.ENCODER, steps // 2, seeds)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", nargs="+", choices=QUESTIONS, default=QUESTIONS)
    parser.add_argument("--short", action="store_true", help="few sizes, steps and seeds")
    parser.add_argument("--steps", type=int, help="of a run that measures quality")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--fashion", help="the folder of Fashion-MNIST; default: that of Debian's package")
    parser.add_argument("--encoder", help="the folder of a Hugging Face encoder")
    parser.add_argument("--texts", help="a file with a label, a tab and a text in each line")
    parser.add_argument("--output", type=Path, default=Path("docs/results"))
    parser.add_argument("--note", nargs="*", default=[], help="lines to add to what a result depends on")
    return parser.parse_args()


if __name__ == "__main__":
    main()
