"""Choice of runs to average, after DiWA (restricted) and model soups (greedy), on the sources' validation images.

Scoring an average at every site takes a round of communication for each candidate, so this is for simulations in which
all validation images lie in one place. The target is never looked at.
"""

from collections.abc import Sequence

import torch

from mergestream.data.datasets.domain_data import DomainData
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError, some
from mergestream.runtime.option_checks import one_of, whole_number

RULES = ("restricted", "greedy")


def select_runs(
    runs: ExpertPool, validation: Sequence[DomainData], rule: str = "restricted", *, batch_size: int = 128
) -> list[str]:
    """The names of the runs to average, in the order in which they were taken in.

    Runs are tried from the most to the least accurate on all validation images together. One is kept if the average
    with it is at least as accurate as the one before ('restricted'), or strictly more accurate ('greedy').
    """
    one_of("rule", rule, RULES)
    whole_number("batch_size", batch_size, low=1)
    if not isinstance(runs, ExpertPool):
        raise InputError(
            "Choosing runs needs a pool of runs, such as pool.candidates where the pool kept them; got none."
        )
    listed = isinstance(validation, list | tuple) and all(isinstance(data, DomainData) for data in validation)
    if not listed or not validation:
        raise InputError("Choosing runs needs a list of DomainData: validation images of at least one source.")
    odd = [data.name for data in validation if data.classes != runs.classes]
    if odd:
        raise InputError(f"The classes of '{odd[0]}' are not those of the runs, in this order: {some(runs.classes)}.")

    @torch.no_grad()
    def accuracy(members: Sequence[str]) -> float:
        weights = runs.merge([1 / len(members) if name in members else 0.0 for name in runs.names])
        right = 0
        for data in validation:
            for picked in torch.arange(len(data)).split(batch_size):
                answers = runs.forward(weights, data.batch(picked)).argmax(dim=-1)
                right += int((answers.cpu() == data.labels[picked]).sum())
        return right / sum(map(len, validation))

    alone = {name: accuracy([name]) for name in runs.names}
    # By name where they tie: the order of runs must not decide.
    first, *others = sorted(runs.names, key=lambda name: (-alone[name], name))
    chosen, best = [first], alone[first]
    for name in others:
        score = accuracy([*chosen, name])
        if score > best or (rule == "restricted" and score == best):
            chosen, best = [*chosen, name], score
    return chosen
