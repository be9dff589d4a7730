"""The card for people: `README.md` in Hugging Face's form, written from an expert's card. No file or patient names."""

from pathlib import Path
from typing import Any

from mergestream.pool.expert_card import ExpertCard
from mergestream.runtime.text_template import filled

SHOWN_METRICS = ("accuracy", "balanced_accuracy", "auroc", "nll", "ece")
FEW = 5


def model_card(card: ExpertCard) -> str:
    """The README of an expert: a YAML header for the hub, with metrics on its own domain, and text for people."""
    from huggingface_hub import EvalResult, ModelCardData

    validation = {name: value for name in SHOWN_METRICS if (value := card.validation(name)) is not None}
    domain = card.domain or card.name
    results = [
        EvalResult("image-classification", "private", f"{domain}, held out", name, round(value, 6))
        for name, value in validation.items()
    ]
    sites = card.metrics.get("sites") or {}
    results += [
        # Hugging Face tells data sets apart by type and configuration, not by name.
        EvalResult("image-classification", "private", f"{site}, reported by the site", name, value, dataset_config=site)
        for site, values in sites.items()
        for name, value in values.items()
    ]
    header = ModelCardData(
        model_name=card.name,
        library_name="timm" if card.architecture.library == "timm" else "mergestream",
        pipeline_tag="image-classification",
        license=card.about.get("licence") or "unknown",
        tags=["mergestream", "model-merging", "research", *(["merge"] if "merged_from" in card.recipe else [])],
        eval_results=results or None,
    )
    merged = [part["name"] for part in card.recipe.get("merged_from", [])]
    counts = {name: _count(card.class_counts.get(name, 0)) for name in card.classes} if card.class_counts else {}
    unseen = [name for name in card.classes if card.class_counts and not card.class_counts.get(name)]
    listed = {"merged": merged, "counts": counts, "unseen": unseen, "metrics": validation, "sites": sites}
    text = filled(Path(__file__).with_name("model_card.md.j2"), _plain, card=card, **listed)
    return f"---\n{header.to_yaml()}\n---\n\n{text.strip()}\n"


def _count(count: int) -> str:
    return str(count) if count >= FEW else f"fewer than {FEW}" if count else "none"


def _plain(value: Any) -> Any:
    """Text that cannot act as HTML or break a table."""
    return str(value).replace("<", "&lt;").replace("|", "\\|")
