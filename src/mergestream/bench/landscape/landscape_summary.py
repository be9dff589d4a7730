"""A summary of a loss landscape in a few sentences."""

from mergestream.bench.landscape.landscape_record import ENTROPY, EXPERT, MEAN, Landscape, Number

# A model nearer to the plane than this share of the longest side is in it, up to rounding.
ON_PLANE = 1e-4


def describe_landscape(landscape: Landscape) -> list[str]:
    """How the mean compares with the experts, the highest barrier, and where the path goes."""
    sentences = [_describe_mean(landscape), _describe_barrier(landscape)]
    sentences += [_describe_path(landscape)] if landscape.path else []
    if landscape.measure == ENTROPY:
        sentences.append("No labels were used: the loss is the entropy of the answers; low means confident, not right.")
    blank = sum(value is None for row in landscape.loss for value in row)
    if blank:
        sentences.append(
            f"{blank} of the {len(landscape.x) * len(landscape.y)} networks of the plane gave no finite answer and are "
            f"left blank. With BatchNorm, try recalibrate_bn."
        )
    return sentences


def _describe_mean(landscape: Landscape) -> str:
    (mean,), experts = landscape.of_kind(MEAN), landscape.of_kind(EXPERT)
    losses = ", ".join(f"{mark.name} {_number(mark.loss)}" for mark in experts)
    differences = landscape.differences
    if len(differences) < len(experts):
        return f"The mean of the three experts, or one of them, gave no finite answer ({losses})."
    groups = {
        "lower than": [d.expert for d in differences if d.high < 0],
        "higher than": [d.expert for d in differences if d.low > 0],
        "not clearly different from": [d.expert for d in differences if d.low <= 0 <= d.high],
    }
    if len(groups["lower than"]) == len(experts):
        place = "is in a valley: lower than every expert"
    elif len(groups["higher than"]) == len(experts):
        place = "is on a ridge: higher than every expert"
    else:
        relations = [f"{relation} {', '.join(names)}" for relation, names in groups.items() if names]
        place = f"is neither in a valley nor on a ridge: {'; '.join(relations)}"
    return f"The mean of the three experts {place} ({landscape.measure} {_number(mean.loss)} nats; {losses})."


def _describe_barrier(landscape: Landscape) -> str:
    barriers = [(segment, segment.barrier) for segment in landscape.segments if segment.barrier is not None]
    if not barriers:
        return "The barriers are unknown: the answers along the segments are not finite."
    segment, barrier = max(barriers, key=lambda pair: pair[1].height)
    if barrier.height <= 0:
        return "There is no barrier: between no two experts does the loss rise above the line between their own."
    unclear = ", which these images do not distinguish from 0" if barrier.low <= 0 else ""
    return (
        f"The highest barrier is {barrier.height:.3f} nats [{barrier.low:.3f}, {barrier.high:.3f}] above the straight "
        f"line, {100 * barrier.at:.0f} % of the way from {segment.start} to {segment.end}{unclear}."
    )


def _describe_path(landscape: Landscape) -> str:
    losses = [point.loss for point in landscape.path if point.loss is not None]
    furthest = max(point.distance for point in landscape.path)
    spread = f"loss {min(losses):.3f} to {max(losses):.3f}" if losses else "no finite loss"
    apart = any(point.encoder_coefficients != point.head_coefficients for point in landscape.path)
    reason = ", since encoder and head have coefficients of their own" if apart else ""
    outside = furthest > ON_PLANE * max(segment.length for segment in landscape.segments)
    place = f"up to {furthest:.3g} off the plane{reason}" if outside else "in the plane"
    return f"{landscape.path_name}: {len(landscape.path)} merged models, {spread}; they are {place}."


def _number(value: Number) -> str:
    return "not finite" if value is None else f"{value:.3f}"
