"""An expert as a folder in Hugging Face's form, which `huggingface-cli upload` takes, and back, bit by bit."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mergestream.pool.checkpoint import (
    EXPERT_FILES,
    README,
    SIGNATURE,
    WEIGHTS,
    holds_only_an_expert,
    open_weights,
    read_statistics,
    write_card,
)
from mergestream.pool.expert_card import CARD, ExpertCard
from mergestream.pool.model_card import model_card
from mergestream.pool.pool_folder import require_new_folder
from mergestream.runtime.errors import CheckpointError
from mergestream.runtime.files import atomic_folder, json_round_trip, write_atomically, write_json, write_text

HUB_WEIGHTS, HUB_CONFIG = "model.safetensors", "config.json"
HUB_NAMES = {name: HUB_WEIGHTS if name == WEIGHTS else name for name in (*EXPERT_FILES, SIGNATURE)}


def export_hub(expert: Path, out: Path) -> ExpertCard:
    """Write an expert, a base or a merged model as a new folder for the hub; of a timm network also timm's config."""
    card = ExpertCard.read(expert)
    open_weights(expert, card)
    with atomic_folder(out, lambda _: False) as scratch:
        _copy(expert, scratch, HUB_NAMES)
        if not (scratch / README).is_file():  # of an expert of an older version
            write_text(scratch / README, model_card(card))
        if card.architecture.library == "timm":
            write_json(scratch / HUB_CONFIG, timm_config(card))
    return card


def timm_config(card: ExpertCard) -> dict[str, Any]:
    """What `timm.create_model("local-dir:…")` and "hf-hub:…" read beside the weights."""
    arguments = {key: value for key, value in card.architecture.arguments.items() if key != "num_classes"}
    pixels = card.preprocessing
    size = None if pixels is None else [len(pixels.mean), *pixels.size]
    seen = {} if pixels is None else {"mean": pixels.mean, "std": pixels.std, "interpolation": pixels.interpolation}
    config = {
        "architecture": card.architecture.name.split(".")[0],
        "num_classes": len(card.classes),
        "label_names": list(card.classes),
        "model_args": arguments,
        "pretrained_cfg": {"num_classes": len(card.classes), **seen, **({"input_size": size} if size else {})},
    }
    return json_round_trip(config)


def import_hub(source: Path, out: Path) -> ExpertCard:
    """Read a folder of `export_hub` back as an expert folder, with its card and signature as they were."""
    require_new_folder(out)
    missing = [name for name in (HUB_WEIGHTS, CARD) if not (source / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{source} lacks {missing[0]}: it was not written by 'mergestream pool export'. Import a plain checkpoint "
            f"without --hf, with --network and --classes."
        )
    with atomic_folder(out, holds_only_an_expert) as scratch:
        _copy(source, scratch, {theirs: ours for ours, theirs in HUB_NAMES.items()})
        card = ExpertCard.read(scratch)
        if card.name != out.name:
            raise CheckpointError(f"The folder is of the expert '{card.name}': import it as a folder of that name.")
        open_weights(scratch, card)
        read_statistics(scratch, card)
    return card


def _copy(source: Path, target: Path, names: dict[str, str]) -> None:
    for name, other in names.items():
        if (source / name).is_file():
            write_atomically(target / other, partial(shutil.copyfile, source / name))


def describe_expert(
    expert: Path, about: dict[str, str], sites: Mapping[str, Mapping[str, float]] | None = None
) -> ExpertCard:
    """Add texts for people, and scores that other sites reported, to an expert's card and write both cards."""
    card = ExpertCard.read(expert)
    metrics = {**card.metrics, "sites": {**card.metrics.get("sites", {}), **sites}} if sites else card.metrics
    card = replace(card, about={**card.about, **about}, metrics=metrics)
    write_card(expert, card)
    return card
