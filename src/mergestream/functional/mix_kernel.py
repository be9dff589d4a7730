"""One GPU kernel for `methods.correction`: what a stream says about the mix of a batch, and the answers under it.

The torch code there and in `neighbours` is the reference, whose hundred small sums take as many launches on a GPU.
Names are the reference's. Import this module only where Triton is installed.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 1 << 15  # B·B·C numbers that one program holds, with both sizes rounded up to a power of two
LEAST, TINY = tl.constexpr(1e-4), tl.constexpr(1e-12)
HOME_IMAGES, NEAR_IMAGES, RECENT_IMAGES = tl.constexpr(32.0), tl.constexpr(128.0), tl.constexpr(8.0)
MORE_THAN_ONE = tl.constexpr(1.5)
GRID, HALF_ROUNDS = tl.constexpr(64), tl.constexpr(5)
LOGIT_BEFORE, LOG_GRID = tl.constexpr(math.log(0.01 / 0.99)), tl.constexpr(math.log(64))
ROOT = tl.constexpr(math.sqrt(2 * math.pi))


def sizes(images: int, classes: int) -> tuple[int, int]:
    """B and C rounded up to powers of two."""
    return 1 << (images - 1).bit_length(), 1 << (classes - 1).bit_length()


def can_run(answers: Tensor) -> bool:
    """Whether one program can hold the messages between the images of a batch [B,C]."""
    images, classes = sizes(*answers.shape)
    return answers.is_cuda and images * images * classes <= LARGEST


def answered(
    answers: list[Tensor], shares: Tensor, images: Tensor, faded: Tensor, bias: float, home: Tensor, past: Tensor
) -> tuple[Tensor, Tensor]:
    """Corrected answers [S,B,C] of one or two sets [B,C], and the vector of the state after `past`.

    That holds six vectors [C] and ten numbers of a `CorrectionState`, as `learn` reads them, then the second set's
    counts [C] and images.
    """
    batch, classes = answers[0].shape
    rows, columns = sizes(batch, classes)
    corrected = torch.empty(len(answers), batch, classes, device=home.device)
    after = torch.empty_like(past)
    judged, own = answers[0].contiguous(), answers[-1].contiguous()
    warps = 4 if rows * rows * columns <= 1 << 12 else 8 if rows * rows * columns <= 1 << 13 else 16
    mix_kernel[(len(answers),)](
        judged, own, shares, images, faded, bias, home, past, corrected, after, batch, classes,
        N=rows, C=columns, num_warps=warps,
    )  # fmt: skip
    return corrected, after


@triton.jit
def as_mix(values, real):  # type: ignore[no-untyped-def]
    values = tl.where(real, tl.maximum(values / tl.sum(values, 0), LEAST), 0.0)
    return values / tl.sum(values, 0)


@triton.jit
def sigmoid(value):  # type: ignore[no-untyped-def]
    return 1 / (1 + tl.exp(-value))


@triton.jit
def spread_of_means(excess, chance, batches, freedom, covariance, of_bias):  # type: ignore[no-untyped-def]
    """How probable it is that the labels of a batch correlate, and rho: `ClumpState.correlation`."""
    explained = tl.maximum(chance + batches * of_bias, TINY)
    freedom = batches * freedom
    squares = tl.maximum((excess + chance) / explained * freedom, 0.0)
    rho = (tl.arange(0, GRID) + 0.5) / GRID
    more = rho * (covariance * batches / explained)
    likelihood = 0.5 * (squares * (more / (1 + more)) - freedom * tl.log(1 + more))
    largest = tl.max(likelihood, 0)
    weight = tl.exp(likelihood - largest)
    total = tl.sum(weight, 0)
    probable = sigmoid(tl.log(total) + largest + LOGIT_BEFORE - LOG_GRID)
    return probable, tl.minimum(tl.maximum(tl.sum(weight * rho, 0) / total, LEAST), 0.95)


@triton.jit
def strength_of_long_run(products, squares, pairs, freedom, covariance, of_bias):  # type: ignore[no-untyped-def]
    """How many images the long run counts beside those of the recent past: `RecentState.strength`."""
    count = tl.maximum(pairs, 1.0)
    error = squares / count / tl.sqrt(freedom * count)
    estimate = tl.minimum(tl.maximum((products / count - of_bias) / covariance, 0.0), 1.0)
    error = tl.minimum(tl.maximum(tl.where(pairs > 0, error / covariance, 10.0), 1e-6), 10.0)
    low, high = -estimate / error, (1 - estimate) / error
    mass = tl.maximum(0.5 * (tl.erf(high * 0.7071067811865476) - tl.erf(low * 0.7071067811865476)), TINY)
    bent = (tl.exp(-0.5 * low * low) - tl.exp(-0.5 * high * high)) / ROOT
    rho = tl.minimum(tl.maximum(estimate + error * bent / mass, LEAST), 0.95)
    without = -0.5 * low * low - tl.log(error * ROOT)
    return 1 / tl.maximum(sigmoid(tl.log(mass) - without + LOGIT_BEFORE) * rho, LEAST) - 1


@triton.jit
def together(likelihood, expected, concentration, present, N: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """`neighbours.answers_in_batch`. A message's sender is its row after odd rounds, its column after even ones."""
    row = tl.arange(0, N)
    apart = row[:, None] != row[None, :]
    by_row = tl.where(apart, present[:, None], 0.0)[:, :, None]
    by_column = tl.where(apart, present[None, :], 0.0)[:, :, None]
    before = (concentration * expected)[None, None, :]
    first = likelihood * expected[None, :]
    messages = (first / tl.sum(first, 1)[:, None])[None, :, :] * by_column
    for _ in range(HALF_ROUNDS):
        total = tl.sum(messages, 1)[:, None, :]
        messages = likelihood[:, None, :] * (before + tl.maximum(total - messages, 0.0))
        messages = messages * (by_row / tl.sum(messages, 2)[:, :, None])
        total = tl.sum(messages, 0)[None, :, :]
        messages = likelihood[None, :, :] * (before + tl.maximum(total - messages, 0.0))
        messages = messages * (by_column / tl.sum(messages, 2)[:, :, None])
    joint = likelihood * ((concentration * expected)[None, :] + tl.sum(messages, 1))
    return joint / tl.sum(joint, 1)[:, None]


@triton.jit
def learn(answer, share, images, faded, home, past, after, column, real, classes, writes):  # type: ignore[no-untyped-def]
    """`Correction.learn`: writes the state and returns its long run, evidence, and answers of the recent past."""
    counts, squares = (tl.load(past + column, real, 0.0), tl.load(past + classes + column, real, 0.0))
    within, before = (tl.load(past + 2 * classes + column, real, 0.0), tl.load(past + 3 * classes + column, real, 0.0))
    last, recent = (tl.load(past + 4 * classes + column, real, 0.0), tl.load(past + 5 * classes + column, real, 0.0))
    number, out = past + 6 * classes, after + 6 * classes
    seen = tl.load(number)
    has_past = tl.where(seen > 0, 1.0, 0.0)
    usual = as_mix(tl.where(seen > 0, counts, home), real)
    mean = tl.sum(answer * share[:, None], 0)
    counts = faded * counts + images * mean
    distance = answer - usual[None, :]
    squares = faded * squares + images * (has_past * tl.sum(distance * distance * share[:, None], 0))
    spread = faded * tl.load(number + 1) + has_past * images
    # ClumpState.add
    near = tl.sum(before, 0)
    distance = answer - mean[None, :]
    within = faded * within + images * tl.sum(distance * distance * share[:, None], 0)
    free = faded * tl.load(number + 2) + images - 1
    of_one = tl.sum(within, 0) / tl.maximum(free, 1.0)
    moved = mean - before / tl.maximum(near, TINY)
    excess = tl.sum(moved * moved, 0) - of_one / images - of_one / tl.maximum(near, 1.0)
    size = tl.load(number + 6)
    excess = excess / (1 + size / tl.maximum(near * near, TINY))
    counted = tl.where((near > 0) & (images > MORE_THAN_ONE), 1.0, 0.0)
    excess = faded * tl.load(number + 3) + counted * excess
    chance = faded * tl.load(number + 4) + counted * (of_one / images)
    batches = faded * tl.load(number + 5) + counted
    left = tl.exp(-images / NEAR_IMAGES)
    before = left * before + images * mean
    # RecentState.add
    departure = has_past * (mean - usual)
    products = faded * tl.load(number + 7) + tl.sum(departure * last, 0)
    lengths = faded * tl.load(number + 8) + tl.sum(departure * departure, 0)
    pairs = faded * tl.load(number + 9) + has_past
    if writes:
        tl.store(after + column, counts, real)
        tl.store(after + classes + column, squares, real)
        tl.store(after + 2 * classes + column, within, real)
        tl.store(after + 3 * classes + column, before, real)
        tl.store(after + 4 * classes + column, departure, real)
        tl.store(out, faded * seen + images)
        tl.store(out + 1, spread)
        tl.store(out + 2, free)
        tl.store(out + 3, excess)
        tl.store(out + 4, chance)
        tl.store(out + 5, batches)
        tl.store(out + 6, left * left * size + images * images)
        tl.store(out + 7, products)
        tl.store(out + 8, lengths)
        tl.store(out + 9, pairs)
    variance = squares / tl.maximum(spread, 1.0)
    return counts, recent, variance, excess, chance, batches, products, lengths, pairs


@triton.jit
def evidence(variance, mix, bias, classes, excess, chance, batches, products, lengths, pairs):  # type: ignore[no-untyped-def]
    """How probable a correlation of labels is, rho, and how many images the long run counts."""
    total = tl.sum(variance, 0)
    freedom = tl.maximum(total * total / tl.maximum(tl.sum(variance * variance, 0), 1e-24), 0.0)
    freedom = tl.maximum(freedom * (classes - 1) / classes, 1.0)
    missing = tl.maximum(mix * (1 - mix) - variance, 0.0)
    of_bias = tl.sum(missing * missing, 0) * bias * bias
    reliability = total / tl.maximum(tl.sum(mix * (1 - mix), 0), TINY)
    covariance = tl.maximum(total * tl.minimum(tl.maximum(reliability, 1e-3), 1.0), TINY)
    probable, rho = spread_of_means(excess, chance, batches, freedom, covariance, of_bias)
    return probable, rho, strength_of_long_run(products, lengths, pairs, freedom, covariance, of_bias)


@triton.jit
def mix_kernel(  # type: ignore[no-untyped-def]
    judged, answers, shares, images, faded, bias, home, past, corrected, after, batch, classes,
    N: tl.constexpr, C: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Program 0 answers the set that is judged and writes the state; program 1 answers another, with its long run."""
    which, row, column = tl.program_id(0), tl.arange(0, N), tl.arange(0, C)
    real, present = column < classes, row < batch
    place, inside = row[:, None] * classes + column[None, :], present[:, None] & real[None, :]
    share = tl.load(shares + row, present, 0.0)
    images, faded, home = tl.load(images), tl.load(faded), tl.load(home + column, real, 0.0)
    answer = tl.load(judged + place, inside, 0.0)
    counts, recent, variance, excess, chance, batches, products, lengths, pairs = learn(
        answer, share, images, faded, home, past, after, column, real, classes, which == 0
    )
    mix = as_mix(counts + home * HOME_IMAGES, real)
    probable, rho, strength = evidence(variance, mix, bias, classes, excess, chance, batches, products, lengths, pairs)
    probable = tl.where(images > MORE_THAN_ONE, probable, 0.0)
    if which == 1:
        other, there = past + 6 * classes + 10, after + 6 * classes + 10
        answer = tl.load(answers + place, inside, 0.0)
        counts = faded * tl.load(other + column, real, 0.0) + images * tl.sum(answer * share[:, None], 0)
        tl.store(there + column, counts, real)
        tl.store(there + classes, faded * tl.load(other + classes) + images)
        mix = as_mix(counts + home * HOME_IMAGES, real)
    expected = (strength * mix + recent) / (strength + tl.sum(recent, 0))
    safe = tl.where(real, mix, 1.0)
    likelihood = tl.where(real[None, :], tl.maximum(answer / safe[None, :], TINY), 0.0)
    here = tl.where(share > 0, 1.0, 0.0)
    alone = answer * (expected / safe)[None, :]
    alone = alone / tl.where(present, tl.sum(alone, 1), 1.0)[:, None]
    answer = probable * together(likelihood, expected, 1 / rho - 1, here, N) + (1 - probable) * alone
    tl.store(corrected + which * batch * classes + place, answer, inside)
    if which == 0:  # RecentState.remember
        recent = tl.exp(-images / RECENT_IMAGES) * (recent + images * tl.sum(answer * share[:, None], 0))
        tl.store(after + 5 * classes + column, recent, real)
