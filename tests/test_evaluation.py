"""One method over one stream, its records, and runs compared."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import mergestream as ms
from conftest import CLASSES, make_images, make_pool
from mergestream.bench import evaluation, records
from mergestream.bench.analysis.comparison import compare, oracle
from mergestream.bench.analysis.duels import describe_duels, duel
from mergestream.bench.evaluation import describe_run, domain_logits
from mergestream.bench.records import is_finished, run_hash


@pytest.fixture(scope="module")
def data() -> ms.DomainData:
    labels = torch.arange(45) % len(CLASSES)
    return ms.DomainData("test", "nice", CLASSES, make_images(45, seed=7), labels)


@pytest.fixture(scope="module")
def stream(data: ms.DomainData) -> ms.streams.Stream:
    return ms.streams.dirichlet(data.labels, alpha=0.1, batch_size=8, seed=0)


def test_a_run_is_the_steps_of_its_method(vit_pool: ms.ExpertPool, data: ms.DomainData, stream) -> None:
    method = ms.create_method("entropy_adaptive", vit_pool, momentum=0.5)
    method.step(make_images(3))  # whatever came before is forgotten
    run = ms.evaluate(method, data, stream)
    method.reset()
    right = 0
    for batch, record in zip(stream, run.steps, strict=True):
        step = method.step(data.images[torch.as_tensor(batch)])
        right += int((step.logits.argmax(-1) == data.labels[torch.as_tensor(batch)]).sum())
        assert record["encoder_coefficients"] == pytest.approx(step.encoder_coefficients.tolist(), rel=1e-5)
        assert record["head_expert"] == step.head_expert
        assert record["predictions"] == step.logits.argmax(-1).tolist()
    assert run.accuracy == pytest.approx(right / len(data))
    assert run.confusions().sum() == len(data)


def test_labels_never_reach_the_method(vit_pool: ms.ExpertPool, data: ms.DomainData, stream) -> None:
    wrong = ms.DomainData("test", "nice", CLASSES, data.images, data.labels.flip(0))
    method = ms.create_method("entropy_adaptive", vit_pool)
    one, two = ms.evaluate(method, data, stream), ms.evaluate(method, wrong, stream)
    assert torch.equal(one.probabilities, two.probabilities)
    assert one.accuracy != two.accuracy


def test_a_saved_run_comes_back(vit_pool: ms.ExpertPool, data: ms.DomainData, stream, tmp_path: Path) -> None:
    run = ms.evaluate(ms.create_method("entropy_adaptive", vit_pool), data, stream)
    folder = run.save(tmp_path / run.hash)
    assert is_finished(folder)
    back = ms.Run.load(folder)
    assert back.hash == run.hash
    assert back.metrics == run.metrics
    assert back.steps[0].pop("schema_version") == 1
    assert (back.confusions() == run.confusions()).all()
    assert all((a == b).all() for a, b in zip(back.batches, run.batches, strict=True))
    header = json.loads((folder / "run.json").read_text())
    assert header["arguments"]["options"]["head"] == "entropy_gap"
    assert header["arguments"]["stream"]["hash"] == stream.hash
    assert header["arguments"]["pool"]["fingerprint"] == vit_pool.fingerprint()
    assert (folder / "steps.jsonl").read_text().count("\n") == len(stream)
    assert "label" not in (folder / "steps.jsonl").read_text()
    stored = np.load(folder / "predictions.npz")
    assert stored["probabilities"].dtype == np.float16
    assert (stored["index"] == np.concatenate(list(stream))).all()


def test_a_runs_name_covers_all_its_numbers_depend_on(vit_pool: ms.ExpertPool, data: ms.DomainData, stream) -> None:
    def name(method: str = "mean", pool=vit_pool, of=data, order=stream, **options) -> str:
        return run_hash(describe_run(ms.create_method(method, pool, **options), of, order))

    other = ms.DomainData("test", "nice", CLASSES, data.images.flip(0), data.labels)
    names = {
        name(),
        name("ensemble"),
        name(coefficients=[0.5, 0.3, 0.2]),
        name(pool=make_pool("vit", seed=3)),
        name(of=other),
        name(order=ms.streams.iid(data.labels, seed=1)),
    }
    assert len(names) == 6
    assert name() == name()


def test_a_static_method_is_only_reordered_by_another_stream(
    vit_pool: ms.ExpertPool, data: ms.DomainData, stream
) -> None:
    other = ms.streams.sorted_by_label(data.labels, batch_size=7, seed=2)
    for name in ("mean", "ensemble"):
        method = ms.create_method(name, vit_pool)
        assert method.static
        first = ms.evaluate(method, data, stream)
        moved = first.reordered(describe_run(method, data, other), other.batches)
        live = ms.evaluate(method, data, other)
        torch.testing.assert_close(moved.probabilities, live.probabilities, rtol=1e-4, atol=1e-6)
        assert torch.equal(moved.labels, live.labels)
        assert moved.hash == live.hash
        assert moved.accuracy == pytest.approx(first.accuracy)
    assert not ms.create_method("mean", vit_pool, recalibrate_bn=True).static


def test_precomputed_logits_serve_a_whole_domain(
    vit_pool: ms.ExpertPool, data: ms.DomainData, stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "CPU_CHUNK", 16)
    expert_logits = {view: domain_logits(vit_pool, data, view) for view in ("original", "hflip")}
    assert expert_logits["original"].shape == (3, len(data), len(CLASSES))
    method = ms.create_method("entropy_adaptive", vit_pool)
    live, given = ms.evaluate(method, data, stream), ms.evaluate(method, data, stream, expert_logits=expert_logits)
    torch.testing.assert_close(live.probabilities, given.probabilities, rtol=1e-4, atol=1e-5)


def test_compare_duel_and_oracle(vit_pool: ms.ExpertPool, data: ms.DomainData, stream) -> None:
    runs = []
    for seed in (0, 1):
        order = ms.streams.iid(data.labels, batch_size=8, seed=seed)
        for name, options in (
            ("mean", {}),
            ("ensemble", {}),
            *(("single_expert", {"expert": e}) for e in vit_pool.names),
        ):
            method = ms.create_method(name, vit_pool, **options)
            arguments = {**describe_run(method, data, order), "seed": seed}
            runs.append(ms.evaluate(method, data, order, arguments=arguments))
    rows = compare(runs)
    assert [row.label for row in rows][:2] == ["mean", "ensemble"]
    for row in rows:
        assert row.runs == 2
        assert row.accuracy.low <= row.accuracy.mean <= row.accuracy.high
        assert row.per_target == {"nice": pytest.approx(row.accuracy.mean)}
    best = oracle([run for run in runs if run.arguments["method"] == "single_expert"])
    assert len(best) == 2
    assert best[0].accuracy == max(r.accuracy for r in runs if r.arguments["method"] == "single_expert")
    (fight,) = duel(runs, "mean", "ensemble")
    assert fight.difference.mean == pytest.approx(fight.our_mean - fight.their_mean)
    assert fight.difference.low <= fight.difference.mean <= fight.difference.high
    (even,) = duel(runs, "mean", "mean")
    assert even.outcome == "not inferior"
    assert even.difference.points() == "+0.0 [+0.0, +0.0]"
    sentence, _ = describe_duels([fight, even])
    assert sentence.startswith(f"On {fight.stream}, mean (")
    assert f"ensemble ({100 * fight.difference.mean:+.1f})" in sentence
    assert "not inferior to mean (+0.0)" in sentence or fight.outcome == even.outcome


def test_leave_one_domain_out() -> None:
    folds = list(ms.leave_one_domain_out(["a", "b", "c"]))
    assert [(fold.target, fold.sources) for fold in folds] == [("a", ("b", "c")), ("b", ("a", "c")), ("c", ("a", "b"))]
    for bad in ([], ["a"], ["a", "a"]):
        with pytest.raises(ms.MergestreamError, match="at least two distinct"):
            list(ms.leave_one_domain_out(bad))


def test_an_empty_stream_is_refused(vit_pool: ms.ExpertPool, data: ms.DomainData) -> None:
    with pytest.raises(ms.MergestreamError, match="no batches"):
        ms.evaluate(ms.create_method("mean", vit_pool), data, [])


def test_a_run_that_cannot_be_written_says_so(
    vit_pool: ms.ExpertPool, data: ms.DomainData, stream, tmp_path: Path
) -> None:
    run = ms.evaluate(ms.create_method("mean", vit_pool), data, stream)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ms.MergestreamError, match="Cannot write"):
        run.save(tmp_path / "file" / "run")


def test_only_a_long_stream_may_repeat_samples(vit_pool: ms.ExpertPool, data: ms.DomainData, tmp_path: Path) -> None:
    stream = ms.streams.create_stream("long:13", data.labels, batch_size=8)
    method = ms.create_method("entropy_adaptive", vit_pool, momentum=0.5)
    run = ms.evaluate(method, data, stream)
    assert len(run.labels) == sum(map(len, stream)) > 2 * len(data)  # every image as often as it comes
    assert run.metrics["images"] == len(run.labels)
    assert run.confusions().sum() == len(run.labels)
    assert (
        ms.Run.load(run.save(tmp_path / "run")).steps[-1]["predictions"] == run.predictions[-len(stream[-1]) :].tolist()
    )
    with pytest.raises(ms.MergestreamError, match="longer than the data"):
        ms.evaluate(method, data, stream.batches)


def test_intervals_of_a_long_stream_rest_on_blocks_of_batches(
    vit_pool: ms.ExpertPool, data: ms.DomainData, stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ms.evaluate(ms.create_method("mean", vit_pool), data, stream)
    whole = run.confusions()
    monkeypatch.setattr(records, "MOST_UNITS", 4)
    blocks = run.confusions()
    assert len(whole) == 6
    assert (blocks == [whole[:2].sum(axis=0), whole[2:4].sum(axis=0), whole[4:].sum(axis=0)]).all()


def test_a_stream_that_does_not_fit_the_data_is_refused(vit_pool: ms.ExpertPool, data: ms.DomainData) -> None:
    method = ms.create_method("mean", vit_pool)
    count = len(data)
    for batches, sentence in (
        ([np.arange(count), np.arange(count)], "longer than the data"),
        ([np.array([0, count])], "longer than the data"),
        ([np.array([-1, 0])], "longer than the data"),
        ([np.array([0, 1]), np.array([1])], "names a sample of 'nice' twice"),
        ([], "no batches"),
        ([np.array([], dtype=int)], "an empty one"),
    ):
        with pytest.raises(ms.MergestreamError, match=sentence):
            ms.evaluate(method, data, batches)
