"""Preprocessing of an imported network: from its configuration or from the command line."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mergestream.networks.library_preprocessing import PILLOW_FILTERS
from mergestream.networks.preprocessing import Preprocessing
from mergestream.runtime.errors import InputError

Values = Mapping[str, Any]


def pixel_options(size: int | None, mean: str | None, std: str | None, interpolation: str | None) -> dict[str, Any]:
    """The preprocessing options given on the command line."""
    numbers = {"mean": mean, "std": std}
    try:
        channels: dict[str, Any] = {k: tuple(map(float, v.split(","))) for k, v in numbers.items() if v is not None}
    except ValueError:
        raise InputError("--mean and --std are one number per channel, as in 0.5,0.5,0.5.") from None
    given = {"size": None if size is None else (size, size), "interpolation": interpolation}
    return {**channels, **{key: value for key, value in given.items() if value is not None}}


def pixel_config(config: Values, processor: Values) -> dict[str, Any]:
    """The preprocessing in timm's configuration or Hugging Face's processor."""
    own = config.get("pretrained_cfg")
    pixels = {key: own.get(key) for key in ("mean", "std", "interpolation")} if isinstance(own, dict) else {}
    if processor:
        factor = processor.get("rescale_factor", 1 / 255)
        if not isinstance(factor, int | float) or not math.isclose(factor, 1 / 255, rel_tol=1e-3):
            raise InputError(
                f"preprocessor_config.json scales pixels by {factor}, not by 1/255. Give --mean and --std."
            )
        pixels |= {"mean": processor.get("image_mean"), "std": processor.get("image_std")}
        if processor.get("do_normalize") is False:
            pixels |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
        resample = processor.get("resample")
        pixels["interpolation"] = dict(enumerate(PILLOW_FILTERS)).get(resample)  # type: ignore[arg-type]
        pixels["size"] = _size(processor.get("size")) if "image_size" not in config else None
    return {key: tuple(v) if isinstance(v, list) else v for key, v in pixels.items() if v is not None}


def _size(value: Any) -> tuple[int, int] | None:
    if isinstance(value, dict):
        height: Any = value.get("height", value.get("shortest_edge"))
        return None if height is None else (height, value.get("width", height))
    return (value, value) if isinstance(value, int) else None


def merged_preprocessing(own: Preprocessing | None, changes: Values) -> Preprocessing | None:
    """The network's own preprocessing with changes, or a new one."""
    if not changes:
        return own
    if own is not None:
        return replace(own, **changes)
    if "size" not in changes:
        raise InputError("This network's preprocessing is unknown: give --size too.")
    return Preprocessing(**changes)
