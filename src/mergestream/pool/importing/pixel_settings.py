"""What an imported network expects of pixels: as its own configuration says, or as its user does."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mergestream.networks.library_preprocessing import PILLOW_FILTERS
from mergestream.networks.preprocessing import Preprocessing
from mergestream.runtime.errors import InputError

Values = Mapping[str, Any]


def pixel_options(size: int | None, mean: str | None, std: str | None, interpolation: str | None) -> dict[str, Any]:
    """What the command line says of pixels, less what it leaves out."""
    numbers = {"mean": mean, "std": std}
    try:
        found: dict[str, Any] = {k: tuple(map(float, v.split(","))) for k, v in numbers.items() if v is not None}
    except ValueError:
        raise InputError("--mean and --std are one number per channel, as in 0.5,0.5,0.5.") from None
    given = {"size": None if size is None else (size, size), "interpolation": interpolation}
    return {**found, **{key: value for key, value in given.items() if value is not None}}


def pixel_config(config: Values, processor: Values) -> dict[str, Any]:
    """timm's configuration and Hugging Face's processor say how pixels were normalised in training."""
    timms = config.get("pretrained_cfg")
    found = {key: timms.get(key) for key in ("mean", "std", "interpolation")} if isinstance(timms, dict) else {}
    if processor:
        factor = processor.get("rescale_factor", 1 / 255)
        if not isinstance(factor, int | float) or not math.isclose(factor, 1 / 255, rel_tol=1e-3):
            raise InputError(
                f"preprocessor_config.json scales pixels by {factor}, not by 1/255. Give --mean and --std."
            )
        found |= {"mean": processor.get("image_mean"), "std": processor.get("image_std")}
        if processor.get("do_normalize") is False:
            found |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
        resample = processor.get("resample")
        found["interpolation"] = dict(enumerate(PILLOW_FILTERS)).get(resample)  # type: ignore[arg-type]
        found["size"] = _size(processor.get("size")) if "image_size" not in config else None
    return {key: tuple(v) if isinstance(v, list) else v for key, v in found.items() if v is not None}


def _size(value: Any) -> tuple[int, int] | None:
    if isinstance(value, dict):
        height: Any = value.get("height", value.get("shortest_edge"))
        return None if height is None else (height, value.get("width", height))
    return (value, value) if isinstance(value, int) else None


def merged_preprocessing(found: Preprocessing | None, known: Values) -> Preprocessing | None:
    if not known:
        return found
    if found is not None:
        return replace(found, **known)
    if "size" not in known:
        raise InputError("What this network expects of pixels is not known: give --size too.")
    return Preprocessing(**known)
