"""A merged model's last layer, fitted to what the experts said of a stream. The equations: docs/prior_adaptive.md."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mergestream.functional import head_fit
from mergestream.networks.last_layer import LastLayer


class FittedHead:
    """Sums over a stream's images, and the layer that was fitted to them last."""

    _centre: Tensor  # what the layer read of the first batch on average [D]; sums about it lose no digits
    _sums: Tensor  # over images that fade [1+D,1+D+C]
    _change: Tensor  # of the merged layer's weight [C,D]
    _bias: Tensor  # [C]

    def __init__(self, layer: LastLayer, before: float, device: torch.device) -> None:
        self._layer, self._before, self._device = layer, before, device

    def learn(self, inputs: Tensor, said: Tensor, shares: Tensor, images: Tensor, faded: Tensor) -> None:
        """A batch of so many images: what the layer read [B,D], and what the experts said of it [B,C]."""
        first = self._sums[0, 0] == 0
        self._centre = torch.where(first, (inputs * shares[:, None]).sum(dim=0), self._centre)
        self._sums = faded * self._sums + images * head_fit.sums(inputs - self._centre, said, shares)

    def answer(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """Logits [B,C] of a merged model with flat weights [P], its last layer fitted anew."""
        start, own = self._layer.of_weights(weights)
        about_centre = own + start @ self._centre
        self._change, bias = head_fit.fitted(self._sums, start, about_centre, self._before, self._change)
        weight = start + self._change
        self._bias = bias - weight @ self._centre
        return (inputs - self._centre) @ weight.T + bias

    def layer(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Weight [C,D] and bias [C] that answered last, of a merged model with flat weights [P]."""
        return self._layer.of_weights(weights)[0] + self._change, self._bias

    def tensors(self) -> dict[str, Tensor]:
        fitted = {"fit_change": self._change, "fit_bias": self._bias}
        return {"fit_centre": self._centre, "fit_sums": self._sums, **fitted}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """What `tensors` gave; where nothing is given, the beginning of a stream."""
        classes, inputs = self._layer.shape
        self._centre = self._taken(tensors, "fit_centre", inputs)
        self._sums = self._taken(tensors, "fit_sums", 1 + inputs, 1 + inputs + classes)
        self._change = self._taken(tensors, "fit_change", classes, inputs)
        self._bias = self._taken(tensors, "fit_bias", classes)

    def _taken(self, tensors: Mapping[str, Tensor], name: str, *shape: int) -> Tensor:
        if name not in tensors:
            return torch.zeros(shape, device=self._device)
        if tensors[name].shape != shape:
            raise ValueError(f"'{name}' has the shape {tuple(tensors[name].shape)}, not {shape}")
        return tensors[name].to(self._device)


def said_together(views: Tensor, counted: Tensor) -> Tensor:
    """What experts say of a batch [B,C]: logits [V,K,B,C], the mean over views, each expert counting so much [K]."""
    return (counted[:, None, None] * views.mean(dim=0)).sum(dim=0)
