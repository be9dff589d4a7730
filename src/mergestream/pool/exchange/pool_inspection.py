"""Overview and verification of a pool on disk."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mergestream.pool import pool_folder
from mergestream.pool.checkpoint import open_weights
from mergestream.pool.class_concepts import joined_concepts
from mergestream.pool.exchange import expert_checks
from mergestream.pool.exchange.expert_checks import NoiseProbe, ProbeResult, attempt, require_statistics
from mergestream.pool.expert_card import BASE, CARD, ExpertCard, base_warnings, differences, read_card
from mergestream.pool.trust.revocations import read_revocations
from mergestream.pool.trust.trusted_signers import TrustedSigners, trusted_signers
from mergestream.runtime.errors import MergestreamError, PoolError

COLUMNS = ("expert", "domain", "accuracy", "temperature", "version", "kept", "sha-256")


def list_pool(pool: Path) -> dict[str, Any]:
    """The cards of a pool and of its previous versions, as JSON."""
    present = pool_folder.read_pool(pool)
    first = next(iter(present.cards.values()), present.base)
    if first is None:
        raise PoolError(f"{pool} holds no expert and no base. A pool is a folder of expert folders.")
    return {
        "experts": [_listed(card, present.root) for card in present.cards.values()],
        "classes": list(first.classes),
        "network": str(first.architecture),
        "base_sha256": present.base.weights_sha256 if present.base else None,
    }


def _listed(card: ExpertCard, root: Path) -> dict[str, Any]:
    previous = pool_folder.previous_versions(root, card.name)
    kept = [{"version": n, "weights_sha256": ExpertCard.read(folder).weights_sha256} for n, folder in previous.items()]
    return {
        "name": card.name,
        "domain": card.domain,
        "network": str(card.architecture),
        "classes": list(card.classes),
        "validation_accuracy": card.validation("accuracy"),
        "temperature": card.temperature,
        "weights_sha256": card.weights_sha256,
        "base_sha256": card.base_sha256,
        "version": max(previous, default=0) + 1,
        "kept_versions": kept,
    }


def listing_lines(pool: Path, listing: dict[str, Any]) -> list[str]:
    """What the experts share, then one aligned line per expert."""
    rows, base = [COLUMNS], listing["base_sha256"]
    for expert in listing["experts"]:
        accuracy, kept = expert["validation_accuracy"], [str(old["version"]) for old in expert["kept_versions"]]
        rows.append(
            (
                expert["name"],
                expert["domain"] or "–",
                "–" if accuracy is None else f"{100 * accuracy:.1f} %",
                f"{expert['temperature']:.3g}",
                str(expert["version"]),
                ", ".join(kept) or "–",
                expert["weights_sha256"][:12],
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"{len(listing['experts'])} experts in {pool.resolve()}",
        f"network: {listing['network']}; classes: {', '.join(listing['classes'])}",
        f"base: {base[:12]}, the shared start" if base else "base: none",
        "",
        *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
    ]


def verify_pool(pool: Path, require_signed_by: Path | None = None) -> "PoolVerification":
    """Check the pool, its candidates and its previous versions: hashes, cards, order, base, statistics, weights.

    `require_signed_by`: the folder of those who must have signed every expert, the base and the candidates.
    """
    trusted = trusted_signers(require_signed_by)
    root = pool_folder.pool_root(pool)
    result = PoolVerification(root, trusted)
    runs = pool_folder.candidates_folder(root)
    if runs.is_dir():
        result.problems += [f"Candidates: {sentence}" for sentence in _candidate_problems(runs, result.cards, trusted)]
    result.problems += _version_problems(root)
    return result


class PoolVerification:
    """Problems and warnings of one folder of experts; the folder is sound if there are no problems."""

    def __init__(self, root: Path, trusted: TrustedSigners | None = None) -> None:
        self.root, self.trusted = root, trusted
        self.signed_by: dict[str, str] = {}
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.cards: dict[str, ExpertCard] = {}
        self.base: ExpertCard | None = None
        folders = pool_folder.subfolders(root)
        for folder in folders:
            if not pool_folder.is_expert_folder(folder):
                self.problems.append(
                    f"{folder} holds no {CARD}, so it is no expert. Ask the site for the whole folder."
                )
            elif (card := attempt(self.problems, read_card, folder)) is not None:
                if folder.name == BASE:
                    self.base = card
                else:
                    self.cards[card.name] = card
        self._check_order({folder.name for folder in folders if pool_folder.is_expert_folder(folder)} - {BASE})
        self._check_signatures()
        if self.cards:
            self._check_experts()
        else:
            self.problems.append(f"There is no whole expert in {self.root}.")

    @property
    def sound(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        about = {
            "sound": self.sound,
            "experts": list(self.cards),
            "signed_by": self.signed_by if self.trusted else None,
        }
        return {**about, "problems": self.problems, "warnings": self.warnings}

    def lines(self) -> list[str]:
        """The problems, the warnings, and the verdict last."""
        count = len(self.problems)
        verdict = f"Sound: {len(self.cards)} experts." if self.sound else f"NOT sound: {count} problem(s)."
        signed = [f"Signed: '{name}' by {signer}" for name, signer in self.signed_by.items()]
        verdict += "" if self.trusted else " Signatures were not checked (--require-signed-by)."
        return [*(f"Wrong: {s}" for s in self.problems), *(f"Warning: {s}" for s in self.warnings), *signed, verdict]

    def _check_signatures(self) -> None:
        revocations = attempt(self.problems, read_revocations, self.root, self.trusted)
        if revocations is not None:
            self.problems += revocations.names(self.cards.values()).values()
        if self.trusted is None:
            return
        for name in (*self.cards, *([BASE] if self.base else [])):
            signed = attempt(self.problems, self.trusted.signed_expert, self.root / name)
            if signed is not None:
                self.signed_by[name] = signed.signer

    def _check_order(self, present: set[str]) -> None:
        path = self.root / pool_folder.ORDER
        order = attempt(self.problems, pool_folder.read_order, self.root) if path.exists() else None
        if order is None:
            return
        names = list(dict.fromkeys(order))
        self.problems += [f"{path} lists '{name}' more than once." for name in sorted(names) if order.count(name) > 1]
        missing = [name for name in names if name not in present]
        self.problems += [f"{path} lists the expert '{name}', but its folder is not there." for name in missing]
        self.warnings += [f"{path} does not list '{name}'; it comes last." for name in sorted(present - set(order))]
        self.cards = {n: self.cards[n] for n in dict.fromkeys([*names, *sorted(self.cards)]) if n in self.cards}

    def _check_experts(self) -> None:
        """Compare each expert and the base with the first expert and with one another."""
        reference = next(iter(self.cards.values()))
        probe = attempt(self.problems, NoiseProbe, reference, self.root / reference.name)
        results: dict[str, ProbeResult] = {}
        for card in (*self.cards.values(), *([self.base] if self.base else [])):
            folder = self.root / card.name
            result = expert_checks.inspect_expert(self.problems, folder, card, reference, self.base, probe)
            if result is not None:
                results[card.name] = result
        self.warnings += joined_concepts(self.cards.values())[1]
        for card in self.cards.values():
            others = [other for other in self.cards.values() if other is not card]
            self.warnings += base_warnings(card, others, self.base)
            if card.name in results:
                other_results = [results[other.name] for other in others if other.name in results]
                self.warnings += expert_checks.confidence_warnings(card, results[card.name], other_results)


def _candidate_problems(folder: Path, experts: dict[str, ExpertCard], trusted: TrustedSigners | None) -> Iterator[str]:
    candidates = PoolVerification(folder, trusted)
    yield from candidates.problems
    if not experts:
        return
    reference = next(iter(experts.values()))
    domains = {card.domain or card.name for card in experts.values()}
    for card in candidates.cards.values():
        yield from differences(card, reference)
        if card.domain not in domains:
            yield f"'{card.name}' is of domain {card.domain!r}, which is no expert's: {', '.join(sorted(domains))}."


def _version_problems(root: Path) -> Iterator[str]:
    """Previous versions must be undamaged; they need not fit the present pool."""
    for expert in sorted(path.name for path in pool_folder.versions_folder(root).glob("*") if path.is_dir()):
        for number, folder in pool_folder.previous_versions(root, expert).items():
            try:
                card = ExpertCard.read(folder)
                open_weights(folder, card)
                require_statistics(folder, card)
            except MergestreamError as error:
                yield f"Version {number} of '{expert}': {error}"
