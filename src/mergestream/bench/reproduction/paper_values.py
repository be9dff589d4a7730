"""The numbers printed in the paper, as data."""

import tomllib
from pathlib import Path
from typing import Any

_PRINTED: dict[str, Any] = tomllib.loads(Path(__file__).with_name("paper_numbers.toml").read_text(encoding="utf-8"))
ROWS: tuple[str, ...] = tuple(_PRINTED["rows"])
BACKBONES: dict[str, str] = _PRINTED["backbones"]  # timm's name -> the paper's
MAIN_TABLES: dict[str, dict[str, dict[str, Any]]] = {
    "Table 1: medical data sets": _PRINTED["table1"],
    "Table 2: natural data sets": _PRINTED["table2"],
}
DATASETS: dict[str, str] = {name: each["title"] for table in MAIN_TABLES.values() for name, each in table.items()}
ABLATION_ROWS: tuple[str, ...] = tuple(_PRINTED["table3"]["rows"])
SECONDS, GIGABYTES = float(_PRINTED["cost"]["seconds"]), float(_PRINTED["cost"]["gigabytes"])


def printed_accuracy(dataset: str, network: str, row: str) -> float | None:
    """Percent in Table 1 or 2; None for a network or a method that the paper does not have."""
    columns = next(table[dataset] for table in MAIN_TABLES.values() if dataset in table)
    return columns[network][ROWS.index(row)] if network in columns and row in ROWS else None


def printed_ablation(dataset: str, row: str) -> tuple[float, float] | None:
    """Percent in Table 3, and what the paper prints after its plus-minus sign."""
    if row not in ABLATION_ROWS:
        return None
    mean, spread = _PRINTED["table3"][dataset][ABLATION_ROWS.index(row)]
    return mean, spread


def backbone_title(network: str) -> str:
    return BACKBONES.get(network, network)


def short_title(network: str) -> str:
    """As a column's heading: B/32."""
    return backbone_title(network).removeprefix("ViT-")
