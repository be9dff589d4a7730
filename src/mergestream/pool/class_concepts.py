"""Codes of the classes (SNOMED CT, RadLex): read from a file, written into a card, and joined over a pool's cards."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from mergestream.pool.checkpoint import write_card
from mergestream.pool.expert_card import ExpertCard
from mergestream.runtime.errors import CheckpointError, InputError
from mergestream.runtime.yaml_file import read_yaml

Concepts = Mapping[str, Mapping[str, str]]  # class -> {value, scheme, meaning}
EXAMPLE = "a class with its code, as in 'malignant: {value: 86049000, scheme: SCT, meaning: Malignant neoplasm}'"
MOST_BYTES = 1 << 20


def set_concepts(folder: Path, file: Path) -> ExpertCard:
    """Write the codes of a file into an expert's card. A signature of the card must be made again."""
    card = ExpertCard.read(folder)
    concepts = read_concepts(file)
    try:
        changed = replace(card, class_concepts=concepts)
    except CheckpointError as error:
        raise InputError(f"{file}: {error}") from error
    write_card(folder, changed)
    return changed


def read_concepts(file: Path) -> dict[str, dict[str, str]]:
    """Read a YAML or JSON file of codes."""
    try:
        value = read_yaml(file, "The list of codes", MOST_BYTES)
    except InputError as error:
        raise InputError(f"{error} It lists {EXAMPLE}.") from error
    if not isinstance(value, dict) or not value or not all(isinstance(each, dict) for each in value.values()):
        raise InputError(f"{file} is not a list of codes: each line is {EXAMPLE}.")
    # YAML reads a code of digits as a number.
    return {str(name): {str(key): str(part) for key, part in code.items()} for name, code in value.items()}


def joined_concepts(cards: Iterable[ExpertCard]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """The codes of all cards, and a sentence per class whose cards contradict each other: that one gets no code."""
    joined: dict[str, dict[str, str]] = {}
    owners: dict[str, str] = {}
    conflicts: dict[str, str] = {}
    for card in cards:
        for name, code in card.class_concepts.items():
            if joined.setdefault(name, code) != code:
                conflicts[name] = (
                    f"'{owners[name]}' and '{card.name}' have different codes for the class '{name}' "
                    f"({_text(joined[name])}, {_text(code)}): reports use a private code. Agree on one."
                )
            owners.setdefault(name, card.name)
    return {name: code for name, code in joined.items() if name not in conflicts}, [*conflicts.values()]


def _text(code: Mapping[str, str]) -> str:
    return json.dumps(f"{code['scheme']} {code['value']} {code['meaning']}")
