"""The merged model of every batch of a stream, as flat weights."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from mergestream.data.datasets.domain_data import DomainData
from mergestream.methods import Method, Step
from mergestream.methods.head_rows import HeadRows
from mergestream.methods.merged_model import MergedModel
from mergestream.methods.prior_adaptive import PriorAdaptive
from mergestream.runtime.errors import InputError


def merged_models(method: Method, data: DomainData, batches: Sequence[np.ndarray]) -> Iterator[tuple[Step, Tensor]]:
    """Stream batches through a method, from a reset: each step, and the weights [P] that answered it.

    The weights may be a buffer that the next step overwrites.
    """
    method.reset()
    for batch in batches:
        step = method.step(data.batch(torch.as_tensor(batch)))
        yield step, weights_of(method, step)


def weights_of(method: Method, step: Step) -> Tensor:
    """The one model [P] that a method answered a step with; refused where it has none."""
    if isinstance(method, MergedModel | PriorAdaptive):
        weights = method.merged_weights()
        assert weights is not None
        return weights
    if step.encoder_coefficients is None:
        raise InputError(
            f"'{method.name}' answers with all experts, not with one merged model, so it has no place in a landscape. "
            f"Choose another method, such as entropy_adaptive or mean."
        )
    rows = HeadRows(method.pool, str(method.options().get("head_rows", "all")))(step.head_coefficients)
    return method.pool.merge(step.encoder_coefficients, step.head_coefficients, rows=rows)
