"""Revoked experts, and experts that join, leave or change while a service runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import mergestream as ms
from engines import Service, batch
from mergestream.pool.exchange.changes import add_expert, remove_expert, replace_expert
from mergestream.pool.exchange.pool_inspection import verify_pool
from mergestream.pool.pool_folder import write_order
from mergestream.pool.trust.revocations import read_revocations, revoke_expert
from mergestream.pool.trust.signatures import sign_expert, sign_file
from mergestream.pool.trust.trusted_signers import TrustedSigners
from mergestream.runtime.errors import InputError, MergestreamError, PoolError, SignatureError, UnknownNameError
from mergestream.serving.audit.replay import compare
from mergestream.serving.engine import revocation_watch, stream_state
from mergestream.serving.engine.answers import Answer
from mergestream.serving.engine.recomputation import LastStates, Reproducer, recompute_step
from mergestream.serving.engine.revocation_watch import NoExpertError, RevocationWatch
from signing import make_key, signed_pool, write_micro_expert

NAMES = ("lyon", "brest", "turin")
MOVING = {"momentum": 0.8}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("signed")
    signed_pool(root / "pool", make_key(root, "consortium"), NAMES)
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(revocation_watch, "SECONDS", 0.0)
    return shutil.copytree(template, tmp_path / "root")


def revoke(root: Path, name: str, **more: Any) -> None:
    revoke_expert(root / "pool", name, key=root / "consortium", reason="A wrong label in training.", **more)


def serve(root: Path, method: str = "entropy_adaptive", options: dict | None = None) -> Service:
    def load() -> ms.ExpertPool:
        return ms.ExpertPool.load(root / "pool", require_signed_by=root / "trusted", keep_revoked=True)

    watch = RevocationWatch(root / "pool", root / "trusted", root / "revoked.json")
    return Service(
        root, load(), method, options=MOVING if options is None else options, load_pool=load, revocations=watch
    )


def went_on(answer: Answer) -> bool:
    """Whether the stream's averages did not start anew."""
    return "average_restarted" not in {finding.code for finding in answer.findings}


def add_turin_again(root: Path, seed: int = 9) -> None:
    folder = write_micro_expert(root / f"sent-{seed}" / "turin", seed, root / "pool" / "base")
    sign_expert(folder, root / "consortium")
    change = replace_expert if (root / "pool" / "turin").exists() else add_expert
    change(root / "pool", folder, require_signed_by=root / "trusted")


# --- the list ---------------------------------------------------------------------------------------------------------


def test_a_revoked_expert_is_refused_everywhere(root: Path) -> None:
    pool, trusted = root / "pool", root / "trusted"
    sent = shutil.copytree(pool / "brest", root / "sent" / "brest")
    revoke(root, "brest", require_signed_by=trusted)
    refusal = "'brest' was revoked on .*: A wrong label in training."
    for options in ({}, {"require_signed_by": trusted}):
        with pytest.raises(SignatureError, match=refusal):
            ms.ExpertPool.load(pool, **options)
        assert any("'brest' was revoked" in each for each in verify_pool(pool, *options.values()).problems)
    assert ms.ExpertPool.load(pool, require_signed_by=trusted, keep_revoked=True).names == NAMES
    remove_expert(pool, "brest")
    assert ms.ExpertPool.load(pool, require_signed_by=trusted).names == ("lyon", "turin")
    for name in (None, "nantes"):  # the list travels with the pool, and knows the weights
        with pytest.raises(SignatureError, match="was revoked"):
            add_expert(pool, sent, name=name)
    with pytest.raises(UnknownNameError):
        revoke(root, "brest")
    revoke(root, "turin")
    listed = read_revocations(pool, TrustedSigners(trusted))
    assert ([each.name for each in listed.revoked], listed.version, listed.signer) == (
        ["brest", "turin"],
        2,
        "consortium",
    )
    with pytest.raises(InputError, match="revoked already"):
        revoke(root, "turin")


def test_a_model_merged_from_a_revoked_expert_is_refused(root: Path) -> None:
    from mergestream.methods.merged_expert import merge_pool

    merge_pool(root / "pool", root / "both", method="mean")
    revoke(root, "brest")
    remove_expert(root / "pool", "brest")
    with pytest.raises(SignatureError, match="'both' was revoked as 'brest'"):
        add_expert(root / "pool", root / "both")


def test_a_list_that_nobody_trusted_has_signed_is_refused(root: Path, tmp_path: Path) -> None:
    pool, trusted = root / "pool", TrustedSigners(root / "trusted")
    revoke(root, "brest")
    path = pool / "revoked.json"
    sign_file(path, make_key(tmp_path / "elsewhere", "stranger"))
    for check in (lambda: read_revocations(pool, trusted), lambda: serve(root)):
        with pytest.raises(SignatureError, match="an unknown signer"):
            check()
    sign_file(path, root / "consortium")
    path.write_text(path.read_text().replace("wrong", "wrang"))
    with pytest.raises(SignatureError, match=r"revoked.json is not as consortium signed it"):
        read_revocations(pool, trusted)
    (pool / "revoked.json.sig").unlink()
    with pytest.raises(SignatureError, match="is not signed"):
        read_revocations(pool, trusted)
    path.write_text("[]")
    with pytest.raises(MergestreamError, match="not a list of revocations"):
        read_revocations(pool)


@pytest.mark.parametrize("reason", ["", " ", "x" * 501, "two\nlines"])
def test_a_reason_is_one_line(root: Path, reason: str) -> None:
    with pytest.raises(InputError, match="A reason has"):
        revoke_expert(root / "pool", "brest", key=root / "consortium", reason=reason)
    assert not (root / "pool" / "revoked.json").exists()


# --- a running service ------------------------------------------------------------------------------------------------


def test_a_revoked_expert_stops_answering_at_once_and_stays_off(root: Path) -> None:
    with serve(root) as service:
        engine = service.engine
        assert engine.answer("ward", batch(0)).encoder_coefficients["brest"] > 0
        assert {each["signed_by"] for each in engine.describe()["experts"]} == {"consortium"}
        revoke(root, "brest")
        answer = engine.answer("ward", batch(1))
        assert answer.encoder_coefficients["brest"] == 0
        assert sum(answer.encoder_coefficients.values()) == pytest.approx(1)
        assert went_on(answer)  # the averages of the others go on
        line = service.lines("experts_revoked")[-1]["body"]
        assert (line["switched_off"], line["version"], line["by"]) == (["brest"], 1, "consortium")
        with pytest.raises(PoolError, match="It cannot be switched on"):
            engine.switch("brest", on=True)
        described = {each["name"]: each for each in engine.describe()["experts"]}
        assert (described["brest"]["on"], described["lyon"]["revoked"]) == (False, None)
        assert "A wrong label" in described["brest"]["revoked"]
        assert service.steps()[-1]["signed_by"] == ["consortium"] * 3
        # Without the list it stays revoked, and the log says that the list is gone.
        (root / "pool" / "revoked.json").unlink()
        assert engine.answer("ward", batch(2)).encoder_coefficients["brest"] == 0
        assert "is not undone" in service.lines("revocations_refused")[-1]["body"]["reason"]
        assert engine.reload()["switched_off"] == ["brest"]
        assert len(service.lines("revocations_refused")) == 1
        before = service.steps()
    with pytest.raises(SignatureError, match="is not undone by an older or a missing list"):
        serve(root)
    (root / "pool" / "revoked.json.sig").unlink()
    revoke_again = {"version": 2, "revoked": json.loads((root / "revoked.json").read_text())["revoked"]}
    (root / "pool" / "revoked.json").write_text(json.dumps({"schema_version": 1, **revoke_again}))
    sign_file(root / "pool" / "revoked.json", root / "consortium")
    with serve(root) as service:
        assert service.lines("service_started")[-1]["body"]["revocations"] == 2
        assert service.engine.answer("ward", batch(3)).encoder_coefficients["brest"] == 0
        last: LastStates = {}
        pool = ms.ExpertPool.load(root / "pool", keep_revoked=True)
        for number, step in enumerate([*before, service.steps()[-1]]):
            assert not compare(step, json.loads(json.dumps(recompute_step(step, batch(number), pool, last))))


def test_without_any_expert_left_nothing_is_answered(root: Path) -> None:
    with serve(root) as service:
        service.engine.answer("ward", batch(0))
        for name in NAMES:
            revoke(root, name)
        for number in (1, 2):
            with pytest.raises(NoExpertError, match="No expert is left to answer"):
                service.engine.answer("ward", batch(number))
        assert len(service.steps()) == 1
        add_turin_again(root)  # a newer version is another expert
        assert service.engine.reload()["switched_off"] == ["lyon", "brest"]
        assert service.engine.answer("ward", batch(3)).encoder_coefficients["turin"] == 1


# --- experts that join, leave or change -------------------------------------------------------------------------------


def test_streams_keep_their_averages_when_experts_join_leave_or_change(root: Path) -> None:
    shutil.copytree(root / "pool", root / "first")
    with serve(root) as service:
        engine = service.engine

        def shares() -> dict[str, float]:
            state = engine._registry.all()[0].state
            return dict(zip(state.experts, state.method.encoder.tolist(), strict=True))

        engine.answer("ward", batch(0))
        whole = shares()
        remove_expert(root / "pool", "turin")
        body = engine.reload()
        assert (body["removed"], body["added"], body["replaced"], body["restarted"]) == (["turin"], [], [], [])
        assert service.lines("pool_reloaded")[-1]["body"] == body
        answer = engine.answer("ward", batch(1))
        assert went_on(answer)
        carried = service.steps()[-1]["state_before"]["method"]["encoder"]["values"]
        rest = whole["lyon"] + whole["brest"]
        assert carried == pytest.approx([whole["lyon"] / rest, whole["brest"] / rest])
        add_turin_again(root)
        shutil.copytree(root / "pool", root / "third")
        assert engine.reload()["added"] == ["turin"]
        two = shares()
        engine.answer("ward", batch(2))
        assert service.steps()[-1]["state_before"]["method"]["encoder"]["values"] == pytest.approx([*two.values(), 0])
        three = shares()
        add_turin_again(root, seed=11)
        assert engine.reload()["replaced"] == ["turin"]
        assert went_on(engine.answer("ward", batch(3)))
        carried = service.steps()[-1]["state_before"]["method"]["encoder"]["values"]
        assert carried == pytest.approx(
            [three["lyon"] / (1 - three["turin"]), three["brest"] / (1 - three["turin"]), 0]
        )
        steps = service.steps()
    pools = [ms.ExpertPool.load(root / name) for name in ("pool", "first", "third")]
    replayed = Reproducer(*pools)
    last: LastStates = {}
    for number, step in enumerate(steps):  # the second step is of a part of the first pool
        again = recompute_step(step, batch(number), replayed._pool_for(step), last)
        assert not compare(step, json.loads(json.dumps(again)))


def test_a_large_state_is_carried_the_same_way_in_a_replay(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines hold hashes, so that the replay has to carry it over by itself."""
    monkeypatch.setattr(stream_state, "MOST_NUMBERS", 100)
    with serve(root, "merge_and_fit", {}) as service:
        service.engine.answer("ward", batch(0))
        add_turin_again(root)
        assert service.engine.reload()["replaced"] == ["turin"]
        service.engine.answer("ward", batch(1))
        steps = service.steps()
    assert list(steps[1]["state_before"]) == ["content_sha256"]
    assert steps[1]["restarted"] is None
    first = ms.ExpertPool.load(root / "pool")
    (root / "old").mkdir()
    for name in ("lyon", "brest", "base"):
        shutil.copytree(root / "pool" / name, root / "old" / name)
    shutil.copytree(root / "pool.versions" / "turin" / "1", root / "old" / "turin")
    write_order(root / "old", NAMES)
    replayed, last = Reproducer(first, ms.ExpertPool.load(root / "old")), LastStates()
    for number, step in enumerate(steps):
        again = recompute_step(step, batch(number), replayed._pool_for(step), last)
        assert not compare(step, json.loads(json.dumps(again)))


def test_streams_go_on_when_an_expert_that_was_off_leaves_the_pool(root: Path) -> None:
    with serve(root) as service:
        engine = service.engine
        engine.answer("ward", batch(0))
        revoke(root, "brest")
        engine.answer("ward", batch(1))
        remove_expert(root / "pool", "brest")
        assert engine.reload()["restarted"] == []
        before = service.steps()[-1]["state_after"]["method"]
        assert went_on(engine.answer("ward", batch(2)))
        assert service.steps()[-1]["state_before"]["method"] == before
        # Other values in a card are another matter: answers depend on them.
        card = root / "pool" / "lyon" / "expert.json"
        card.write_text(json.dumps({**json.loads(card.read_text()), "temperature": 2.0}))
        sign_expert(root / "pool" / "lyon", root / "consortium")
        assert engine.reload()["restarted"] == ["ward"]


def test_a_method_that_learns_from_all_experts_starts_anew(root: Path) -> None:
    with serve(root, "adamerging", {}) as service:
        service.engine.answer("ward", batch(0))
        remove_expert(root / "pool", "turin")
        assert service.engine.reload()["restarted"] == ["ward"]
        assert "learns from all of them" in service.engine.answer("ward", batch(1)).findings[0].sentence
