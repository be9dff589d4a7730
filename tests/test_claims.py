"""The paper's claims: closed forms, independent references, planted truths, bad input, and a real benchmark."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benching import bench_arguments, command, write_consortium
from mergestream.bench.analysis.comparison import Estimate, pairing_of
from mergestream.bench.claims.claim_checks import Evidence, check_claims, check_scores, evidence_of_runs, share_of
from mergestream.bench.claims.claim_finding import (
    FAILS,
    HOLDS,
    UNKNOWN,
    ClaimFinding,
    claims_by_stream,
    format_estimate,
    verdict_of,
)
from mergestream.bench.records import Run
from mergestream.bench.report.expert_sections import draw_findings
from mergestream.bench.report.figures import new_figure
from mergestream.functional.rank_correlation import kendall, spearman

CLASSES = ("a", "b", "c")
values = st.lists(st.integers(0, 4), min_size=2, max_size=12)


@pytest.mark.parametrize("correlation", [spearman, kendall])
def test_correlations_in_closed_form(correlation) -> None:
    rising = np.arange(5.0)
    assert correlation(rising, rising**3) == 1
    assert correlation(rising, -rising) == -1
    assert correlation(rising, np.array([1, 0, 2, 0, 1.0])) == 0  # symmetric about the middle
    assert np.isnan(correlation(rising, np.ones(5)))
    assert correlation(np.array([1, 1, 2.0]), np.array([3, 3, 4.0])) == 1  # ties that agree


@given(values, st.randoms(use_true_random=False))
def test_correlations_with_ties_are_scipys(x: list[int], random) -> None:
    y = [random.randint(0, 4) for _ in x]
    a, b = np.array(x, dtype=float), np.array(y, dtype=float)
    if len(set(x)) > 1 and len(set(y)) > 1:
        assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
        assert kendall(a, b) == pytest.approx(stats.kendalltau(a, b).statistic)


@given(st.integers(0, 2**32 - 1))
def test_counts_stand_for_a_resample(seed: int) -> None:
    random = np.random.RandomState(seed)
    x, y = random.randint(6, size=(2, 15)).astype(float)
    picked = random.randint(15, size=(4, 15))
    counts = np.stack([np.bincount(each, minlength=15) for each in picked])
    for ours, theirs in ((spearman, stats.spearmanr), (kendall, stats.kendalltau)):
        expected = [theirs(x[each], y[each]).statistic for each in picked]
        np.testing.assert_allclose(ours(x, y, counts), expected, atol=1e-12)


def make_evidence(entropy: np.ndarray, error: np.ndarray, target: str = "graz") -> Evidence:
    return Evidence(target, "iid", ("x", "y", "z"), entropy, entropy[:, ::-1].copy(), error)


@pytest.mark.parametrize(("sign", "verdict"), [(1, HOLDS), (-1, FAILS)])
def test_a_perfect_and_a_reversed_order_of_experts(sign: int, verdict: str) -> None:
    entropy = np.random.RandomState(0).rand(20, 3)
    findings = check_scores([make_evidence(entropy, 0.5 + sign * entropy / 3)])
    for finding in findings[:4]:
        assert finding.estimate == Estimate(sign, sign, sign)
        assert finding.verdict == verdict
    assert [f.measure.split()[0] for f in findings[:4]] == ["Spearman", "Spearman", "Kendall", "Kendall"]


def test_unrelated_scores_and_errors_tell_nothing() -> None:
    wrong = 0
    for seed in range(20):
        random = np.random.RandomState(seed)
        findings = check_scores([make_evidence(random.rand(30, 3), random.rand(30, 3))])
        wrong += sum(finding.verdict != UNKNOWN for finding in findings)
    assert wrong / (20 * 5) <= 0.15  # 5 % is meant; 100 intervals, five of a draw tied to each other


def test_equal_errors_leave_a_batch_out_and_equal_everywhere_tell_nothing() -> None:
    entropy = np.random.RandomState(0).rand(20, 3)
    error = entropy.copy()
    error[::2] = 0.25
    finding = check_scores([make_evidence(entropy, error)])[0]
    assert finding.estimate == Estimate(1, 1, 1)
    alike = check_scores([make_evidence(entropy, np.full((20, 3), 0.25))])[0]
    assert (alike.estimate, alike.verdict) == (None, UNKNOWN)
    assert "the same error" in alike.reason


def test_few_batches_give_no_verdict_and_more_seeds_of_a_target_no_narrower_interval() -> None:
    random = np.random.RandomState(0)
    entropy = random.rand(30, 3)
    one = make_evidence(entropy, entropy + random.rand(30, 3))
    few = check_scores([make_evidence(entropy[:5], entropy[:5])])[0]
    assert few.verdict == UNKNOWN
    width = [f.estimate.high - f.estimate.low for f in (check_scores([one])[0], check_scores([one] * 8)[0])]
    assert width[1] > 0.9 * width[0]


def test_entropy_and_max_softmax_of_probabilities_by_hand() -> None:
    p = np.array([[0.5, 0.99], [0.88, 0.99]])  # [T,K]: the probability of each expert's answer
    answers = {"x": (0, 0), "y": (0, 1)}
    runs = []
    for k, (expert, own) in enumerate(answers.items()):
        probabilities = torch.tensor([[q, 1 - q] if c == 0 else [1 - q, q] for q, c in zip(p[:, k], own, strict=True)])
        arguments = {
            "method": "single_expert", "label": expert, "seed": 0, "options": {"expert": expert},
            "pool": {"fingerprint": "p", "experts": ["x", "y"]}, "data": {"domain": "t"},
            "stream": {"name": "s", "hash": "h"},
        }  # fmt: skip
        steps, batches = [{"seconds": None}] * 2, [np.array([0]), np.array([1])]
        runs.append(Run.finish(arguments, ("a", "b"), steps, batches, torch.tensor([0, 1]), probabilities))
    (evidence,) = evidence_of_runs(runs)
    np.testing.assert_allclose(evidence.entropy, -(p * np.log(p) + (1 - p) * np.log(1 - p)), rtol=2e-3)
    np.testing.assert_allclose(evidence.max_softmax, 1 - p, atol=1e-3)
    assert evidence.error.tolist() == [[0, 0], [1, 0]]


DEFAULTS = {"score": "entropy", "weighting": "inverse", "encoder_sharpness": 1.0, "head": "entropy_gap"}


def make_run(label: str, right: float, target: str = "graz", pool: str = "p", seed: int = 0, **options) -> Run:
    """Thirty batches of ten; `right` is the share of right answers, the same images for every method."""
    ease = np.random.RandomState(len(target)).rand(300)
    labels = torch.arange(300) % 3
    answers = torch.where(torch.from_numpy(ease < right), labels, (labels + 1) % 3)
    method = label.partition("(")[0]
    arguments = {
        "method": method, "label": label, "seed": seed, "pool": {"fingerprint": pool, "experts": ["x", "y"]},
        "options": {**(DEFAULTS if method == "entropy_adaptive" else {}), **options},
        "data": {"domain": target}, "stream": {"name": "iid", "hash": f"{target}{seed}"},
    }  # fmt: skip
    batches = np.split(np.arange(300), 30)
    probabilities = torch.nn.functional.one_hot(answers, 3) * 0.7 + 0.1
    return Run.finish(arguments, CLASSES, [{"seconds": None} for _ in batches], batches, labels, probabilities)


CLAIMS = {
    "entropy_beats_max_softmax": "Our question: entropy is a better score",
    "inverse_beats_softmax": "inverse of the entropy",
    "decoupled_beats_shared": "better than shared",
    "gain_over_the_mean": "gain over the mean.$",
    "share_of_the_layer_wise_gain": "85 % or more",
}


def by_name(findings: list[ClaimFinding], name: str) -> list[ClaimFinding]:
    return [finding for finding in findings if re.search(CLAIMS[name], finding.claim)]


def variants(ours: float, others: float, mean: float, layer: float, targets: tuple[str, ...] = ("graz",)) -> list[Run]:
    runs = []
    for target in targets:
        runs += [
            make_run("mean", mean, target),
            make_run("entropy_adaptive", ours, target),
            make_run("entropy_adaptive(head=shared)", others, target, head="shared"),
            make_run("entropy_adaptive(score=max_softmax)", others, target, score="max_softmax"),
            make_run(
                "entropy_adaptive(weighting=softmax, encoder_sharpness=5)",
                others,
                target,
                weighting="softmax",
                encoder_sharpness=5.0,
            ),
            make_run("adamerging(granularity=layer)", layer, target, granularity="layer"),
        ]
    return runs


@pytest.mark.parametrize(("ours", "others", "verdict"), [(0.8, 0.6, HOLDS), (0.6, 0.8, FAILS), (0.7, 0.7, UNKNOWN)])
def test_variants_win_lose_or_tie(ours: float, others: float, verdict: str) -> None:
    findings = check_claims(variants(ours, others, 0.5, 0.9))
    for name in ("entropy_beats_max_softmax", "inverse_beats_softmax", "decoupled_beats_shared"):
        (finding,) = by_name(findings, name)
        assert finding.verdict == verdict, name
        assert finding.unit == "points"
        assert finding.estimate.mean == pytest.approx(100 * (ours - others), abs=7)
    assert "encoder_sharpness=5" in by_name(findings, "inverse_beats_softmax")[0].measure


def test_shares_of_the_layer_wise_gain() -> None:
    runs = variants(0.8, 0.6, 0.5, 0.9, targets=("graz", "turin"))
    findings = check_claims(runs)
    accuracies = {label: np.mean([r.accuracy for r in runs if r.arguments["label"] == label])
                  for label in {r.arguments["label"] for r in runs}}  # fmt: skip
    mean, layer = accuracies["mean"], accuracies["adamerging(granularity=layer)"]
    decoupled, shared = by_name(findings, "share_of_the_layer_wise_gain")
    for finding, label in ((decoupled, "entropy_adaptive"), (shared, "entropy_adaptive(head=shared)")):
        assert finding.estimate.mean == pytest.approx((accuracies[label] - mean) / (layer - mean))
        assert finding.estimate.low < finding.estimate.mean < finding.estimate.high
        assert finding.verdict == FAILS
    assert len([f for f in by_name(findings, "gain_over_the_mean") if f.verdict == HOLDS]) == 6 / 2


def test_no_gain_of_the_layer_wise_coefficients_leaves_nothing_to_share() -> None:
    for finding in by_name(check_claims(variants(0.8, 0.6, 0.7, 0.7)), "share_of_the_layer_wise_gain"):
        assert (finding.estimate, finding.verdict) == (None, UNKNOWN)
        assert "no clear gain" in finding.reason


def test_the_share_has_fiellers_interval() -> None:
    """Normal draws have a closed form: the roots of (m_p - s m_w)^2 = z^2 (v_p + s^2 v_w)."""
    random = np.random.RandomState(0)
    part, whole = (mean + 0.1 * random.randn(1, 200_000) for mean in (1.0, 2.0))
    share = share_of((np.array([1.0]), part), (np.array([2.0]), whole), ["graz"])
    variance = (stats.norm.ppf(0.975) * 0.1) ** 2
    roots = np.sort(np.roots([2.0**2 - variance, -2 * 1.0 * 2.0, 1.0**2 - variance]))
    assert share.mean == pytest.approx(0.5)
    np.testing.assert_allclose([share.low, share.high], roots, atol=2e-3)


def test_an_interval_decides_only_as_a_whole() -> None:
    assert verdict_of(Estimate(1, 0.1, 2)) == HOLDS
    assert verdict_of(Estimate(-1, -2, -0.1)) == FAILS
    assert verdict_of(Estimate(0.1, 0, 2)) == verdict_of(Estimate(0, 0, 0)) == UNKNOWN
    assert verdict_of(Estimate(0.9, 0.86, 1), at_least=0.85) == HOLDS


def test_nothing_given_says_what_is_missing_for_every_claim() -> None:
    findings = check_claims([])
    assert {finding.verdict for finding in findings} == {UNKNOWN}
    assert all(finding.reason.startswith("Missing: ") and finding.estimate is None for finding in findings)
    assert len({finding.claim for finding in findings}) == 9


def test_runs_without_labels_are_left_out() -> None:
    bare = SimpleNamespace(labels=torch.full((300,), -1), arguments=make_run("mean", 0.5).arguments)
    assert [f.reason for f in check_claims([bare])] == [f.reason for f in check_claims([])]


@pytest.fixture(scope="module")
def benchmark_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("consortium")
    write_consortium(folder)
    methods = (
        "mean, entropy_adaptive(head=entropy_gap|shared), entropy_adaptive(score=max_softmax), "
        "entropy_adaptive(weighting=softmax), adamerging(granularity=layer)"
    )
    done = command(*bench_arguments(folder, folder / "out", "--methods", methods, "--seeds", "0"))
    assert done.returncode == 0, done.stderr
    return [Run.load(path) for path in sorted((folder / "out" / "runs").glob("[!.]*"))]


def test_a_real_benchmark_speaks_to_every_claim(benchmark_runs: list[Run]) -> None:
    findings = check_claims(benchmark_runs)
    lacking = {finding.claim for finding in findings if finding.reason.startswith("Missing: ")}
    assert not lacking
    streams = {finding.stream for finding in findings if finding.stream}
    assert streams == {"iid", "dirichlet:0.05"}
    table = claims_by_stream(findings)
    assert set(table.columns) == {"claim", "measure", *streams}
    assert all(cell[-1] in "✓✗?" for row in table.rows for cell in row[2:])


def test_evidence_of_runs_is_what_the_method_recorded(benchmark_runs: list[Run]) -> None:
    """Probabilities of single experts, rounded to fp16, give back the entropies of the method's own records."""
    for run in benchmark_runs:
        if run.arguments["label"] == "entropy_adaptive":
            where = pairing_of(run), run.arguments["stream"]["name"]
            same = [r for r in benchmark_runs if (pairing_of(r), r.arguments["stream"]["name"]) == where]
            (evidence,) = evidence_of_runs(same)
            assert list(evidence.experts) == run.arguments["pool"]["experts"]
            recorded = [step["entropy"] for step in run.steps]
            np.testing.assert_allclose(evidence.entropy, recorded, atol=2e-3)
    assert len(evidence_of_runs(benchmark_runs)) == 3 * 2  # targets, streams


def test_findings_are_drawn_by_unit_and_printed_by_unit() -> None:
    findings = check_claims(variants(0.8, 0.6, 0.5, 0.9))
    gains = by_name(findings, "gain_over_the_mean")
    _, axes = new_figure(5, 4)
    draw_findings(axes[0, 0], gains)
    assert [tick.get_text() for tick in axes[0, 0].get_yticklabels()] == ["iid"] * len(gains)
    assert [text.get_text() for text in axes[0, 0].texts] == [finding.measure for finding in gains]
    assert axes[0, 0].get_xlabel().startswith("points")
    assert format_estimate(Estimate(0.87, 0.8, 0.95), "share") == "+87 [80, 95] %"
    assert format_estimate(Estimate(-0.6, -1, -0.2), "points") == "-0.60 [-1.00, -0.20] points"
