"""The signed list of experts that a consortium no longer uses, `revoked.json`; it travels with the pool."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mergestream.pool.expert_card import ExpertCard, require_schema
from mergestream.pool.pool_folder import changed_pool, locked_pool
from mergestream.pool.trust.signatures import sign_file
from mergestream.pool.trust.trusted_signers import TrustedSigners, trusted_signers
from mergestream.runtime.errors import CheckpointError, InputError, SignatureError, require_known
from mergestream.runtime.files import error_text, write_json
from mergestream.runtime.json_record import parsed

REVOKED, SCHEMA_VERSION = "revoked.json", 1


@dataclass(frozen=True)
class Revocation:
    """One expert that must not answer any more. Its weights' hash identifies it, whatever its folder is called."""

    name: str
    weights_sha256: str
    reason: str
    time: str

    def sentence(self, name: str) -> str:
        other = "" if name == self.name else f" as '{self.name}'"
        return f"'{name}' was revoked{other} on {self.time[:10]}: {self.reason.rstrip('.')}."


@dataclass(frozen=True)
class RevocationList:
    """All revocations of a pool. Its version grows with every change; 0 is no list at all."""

    version: int = 0
    revoked: tuple[Revocation, ...] = ()
    signer: str | None = None  # None where signatures were not checked

    def of(self, card: ExpertCard) -> Revocation | None:
        """Why an expert, or a part that it was merged from, is revoked; None if it is not."""
        hashes = [card.weights_sha256, *_parts(card)]
        return next((each for each in self.revoked if each.weights_sha256 in hashes), None)

    def names(self, cards: Iterable[ExpertCard]) -> dict[str, str]:
        """The revoked experts among some, each with a sentence that says why."""
        revocations = ((card.name, self.of(card)) for card in cards)
        return {name: revocation.sentence(name) for name, revocation in revocations if revocation is not None}

    def refuse(self, cards: Iterable[ExpertCard]) -> None:
        """Refuse experts that are revoked."""
        sentences = self.names(cards)
        if sentences:
            raise SignatureError(f"{' '.join(sentences.values())} Remove it with 'mergestream pool remove'.")

    def to_json(self) -> dict[str, Any]:
        entries = [asdict(each) for each in self.revoked]
        return {"schema_version": SCHEMA_VERSION, "version": self.version, "revoked": entries}


def _parts(card: ExpertCard) -> list[Any]:
    """Hashes of the experts that a merged model consists of."""
    parts = card.recipe.get("merged_from")
    return [each.get("weights_sha256") for each in parts if isinstance(each, dict)] if isinstance(parts, list) else []


def read_revocations(pool: Path, trusted: TrustedSigners | None = None) -> RevocationList:
    """The list of a pool. `trusted`: who may have signed it; without them its signature is not checked."""
    path = pool / REVOKED
    if not path.exists() and not path.is_symlink():
        return RevocationList()
    try:
        signer, content = (None, path.read_bytes()) if trusted is None else trusted.signed_file(path)
        value = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error_text(error)}. Restore it from its source.") from error
    return revocations_of(value, str(path), signer)


def revocations_of(value: Any, where: str, signer: str | None = None) -> RevocationList:
    """A list from its JSON."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is not a list of revocations.")
    require_schema("revoked", value, where)
    entries = tuple(parsed(Revocation, each) for each in value["revoked"])
    return RevocationList(value["version"], entries, signer)


def revoke_expert(
    pool: Path,
    expert: str,
    *,
    key: Path,
    reason: str,
    certificate: Path | None = None,
    chain: Sequence[Path] = (),
    require_signed_by: Path | None = None,
) -> RevocationList:
    """Add an expert of the pool to its list of revocations, and sign the list. The expert's folder stays."""
    trusted = trusted_signers(require_signed_by)
    with locked_pool(pool) as present:
        require_known("expert in this pool", expert, present.cards)
        old, card = read_revocations(present.root, trusted), present.cards[expert]
        if old.of(card) is not None:
            raise InputError(f"'{expert}' is revoked already, in version {old.version} of the list.")
        time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        entry = Revocation(expert, card.weights_sha256, reason.strip(), time)
        new = RevocationList(old.version + 1, (*old.revoked, entry))
        try:
            require_schema("revoked", new.to_json(), REVOKED)
        except CheckpointError as error:
            raise InputError("A reason has 1 to 500 characters on one line. Name no person and no patient.") from error
        with changed_pool(present.root) as scratch:
            write_json(scratch / REVOKED, new.to_json())
            sign_file(scratch / REVOKED, key, certificate, chain)
        return new
