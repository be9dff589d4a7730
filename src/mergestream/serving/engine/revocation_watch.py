"""Revocations in a running service: the pool's list is looked at again every few seconds, and never forgotten."""

import logging
import time
from collections.abc import Iterable
from pathlib import Path

from mergestream.pool.expert_card import ExpertCard
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.trust.revocations import REVOKED, RevocationList, read_revocations, revocations_of
from mergestream.pool.trust.signatures import signature_of
from mergestream.pool.trust.trusted_signers import trusted_signers
from mergestream.runtime.errors import MergestreamError, PoolError, SignatureError
from mergestream.runtime.files import read_json, stamp_of, write_json
from mergestream.serving.audit import line_kinds
from mergestream.serving.audit.log_writer import AuditLog, NoAuditLog
from mergestream.serving.engine.lineup import Lineup, ready

SECONDS = 2.0  # between two looks at the files
log = logging.getLogger(__name__)


class NoExpertError(PoolError):
    """Every expert that could answer is revoked."""


class RevocationWatch:
    """The newest list that the service has seen. It is kept in the state folder: an older one is never used again."""

    def __init__(self, pool: Path, trusted: Path | None, memory: Path) -> None:
        """`trusted`: folder of those who may sign the list; None: not checked. `memory`: file of the newest list."""
        self._pool, self._trusted, self._memory = pool, trusted, memory
        self.newest = revocations_of(read_json(memory, 1), str(memory)) if memory.exists() else RevocationList()
        self._looked, self._stamp = time.monotonic(), self._present()
        self._take()

    @property
    def due(self) -> bool:
        return time.monotonic() - self._looked >= SECONDS

    def look(self) -> str | None:
        """Take a newer list if there is one. The sentence that says why a changed list is refused, once; else None."""
        self._looked, stamp = time.monotonic(), self._present()
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            self._take()
        except MergestreamError as error:
            log.error("the list of revocations is refused, the last one stays in use: %s", error)
            return str(error)
        return None

    def names(self, cards: Iterable[ExpertCard]) -> dict[str, str]:
        """The revoked experts among some, each with a sentence that says why."""
        return self.newest.names(cards)

    def off(self, pool: ExpertPool, switched_off: Iterable[str]) -> list[str]:
        """The experts that are off: switched off before, or revoked. Refused if no other is left."""
        revoked = self.names(pool.cards)
        off = {*switched_off, *revoked} & set(pool.names)
        if revoked and off == set(pool.names):
            raise NoExpertError(f"No expert is left to answer. {' '.join(revoked.values())}")
        return sorted(off)

    def _take(self) -> None:
        present = read_revocations(self._pool, trusted_signers(self._trusted))
        older = present.version < self.newest.version
        if older or (present.version == self.newest.version and present.revoked != self.newest.revoked):
            raise SignatureError(
                f"{self._pool / REVOKED} is version {present.version}, and this service has seen another list of "
                f"version {self.newest.version}: a revocation is not undone by an older or a missing list. Restore it."
            )
        if present.version > self.newest.version:
            write_json(self._memory, present.to_json())
        self.newest = present

    def _present(self) -> tuple[object, object]:
        file = self._pool / REVOKED
        return stamp_of(file), stamp_of(signature_of(file))


def without_revoked(watch: RevocationWatch, lineup: Lineup, audit: AuditLog | NoAuditLog) -> Lineup:
    """Look at the list again, and switch newly revoked experts off. The log has it before they are off.

    NoExpertError: nobody is left, or the method cannot do without one that is revoked.
    """
    if (refusal := watch.look()) is not None:
        audit.append(line_kinds.LIST_REFUSED, {"reason": refusal, "in_use": watch.newest.version})
    revoked = watch.names(lineup.pool.cards)
    if set(revoked) <= set(lineup.off):
        return lineup
    about = {"experts": revoked, "switched_off": sorted({*lineup.off, *revoked})}
    audit.append(line_kinds.REVOKED, {**about, "version": watch.newest.version, "by": watch.newest.signer})
    try:
        return ready(Lineup(lineup.pool, lineup.method, lineup.options, watch.off(lineup.pool, lineup.off)))
    except MergestreamError as error:
        raise NoExpertError(str(error)) from error
