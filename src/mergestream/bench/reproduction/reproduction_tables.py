"""Tables of a reproduction: ours, the paper's, and the difference."""

from mergestream.bench.analysis.comparison import grouped
from mergestream.bench.analysis.cost import shown
from mergestream.bench.claims.claim_checks import AMONG, GAINS, OVER
from mergestream.bench.claims.claim_finding import MARKS, NOTE, format_estimate
from mergestream.bench.claims.theory_checks import DIVERSE, LOCAL, PRIORS, WEAKER, check_drift
from mergestream.bench.report.result_table import ResultTable, format_number, grid_table, mark_best, record_table
from mergestream.bench.reproduction.paper_values import (
    BACKBONES,
    DATASETS,
    GIGABYTES,
    MAIN_TABLES,
    ROWS,
    SECONDS,
    backbone_title,
    printed_ablation,
    printed_accuracy,
    short_title,
)
from mergestream.bench.reproduction.reproduction_plan import PARTS, SETS
from mergestream.bench.reproduction.reproduction_record import MeasuredRow, ReproductionRecord

OURS, PAPER, DIFFERENCE = "ours", "paper", "difference"
OWN_ROW = "entropy-adaptive"
CLAIMS = {  # by claim, or by what is measured for it
    DIVERSE: "different errors",
    LOCAL: "cost of averaging weights",
    WEAKER: "weaker logits",
    PRIORS: "certainty by class share",
    f"Spearman {OVER}": "entropy and error over time",
    f"Spearman {AMONG}": "entropy and error among experts",
    GAINS: "gain over the mean",
}
SILENT = {f"fig{n}": f"The paper prints Figure {n} as a drawing, without numbers." for n in range(2, 6)}


def main_tables(record: ReproductionRecord) -> list[ResultTable]:
    """Tables 1 and 2 in the paper's layout, each cell ours with the difference to the paper's in brackets."""
    note = f"Mean accuracy in %, every domain left out in turn; {', '.join(map(backbone_title, record.backbones))}. "
    note += "In brackets the points above the paper's value. " * any(each in BACKBONES for each in record.backbones)
    tables, several = [], len(record.backbones) > 1
    for title, sets in MAIN_TABLES.items():
        cells = {
            (row, f"{DATASETS[dataset]} {short_title(network)}" if several else DATASETS[dataset]): _with_difference(
                record, dataset, network, row
            )
            for row in ROWS
            for dataset in sets
            for network in record.backbones
            if dataset in _measured(record)
        }
        if cells:
            tables.append(mark_best(grid_table(title, "method", cells, str, note=f"{note}Bold: the best of ours.")))
    return tables


def _measured(record: ReproductionRecord) -> list[str]:
    return [name for name in DATASETS if any(row.dataset == name for row in record.of_part("table1"))]


def _with_difference(record: ReproductionRecord, dataset: str, network: str, row: str) -> str:
    ours, printed = record.find("table1", dataset, network, row), printed_accuracy(dataset, network, row)
    if ours is None:
        return "–"
    value = 100 * ours.accuracy.mean
    return f"{value:.2f}" if printed is None else f"{value:.2f} ({_signed(value - printed, 1)})"


def dataset_tables(record: ReproductionRecord) -> list[ResultTable]:
    """One table per measured data set: ours with its interval, the paper's value and the difference."""
    return [_dataset_table(record, name) for name in _measured(record)]


def _dataset_table(record: ReproductionRecord, dataset: str) -> ResultTable:
    cells: dict[tuple[str, str], str] = {}
    others = [network for network in BACKBONES if network not in record.backbones]
    for row in ROWS:
        for network in record.backbones:
            ours = record.find("table1", dataset, network, row)
            printed, title = printed_accuracy(dataset, network, row), short_title(network)
            cells |= {(row, f"{title} {heading}"): cell for heading, cell in _compared(ours, printed).items()}
        for network in others:
            cells[row, f"{short_title(network)} {PAPER}"] = format_number(printed_accuracy(dataset, network, row), 2)
    note = "Mean accuracy in % with its 95 % interval."
    note += " The difference is ours less the paper's, in points." * (len(others) < len(BACKBONES))
    note += f" Not run here: {', '.join(map(backbone_title, others))}." if others else ""
    return grid_table(f"{DATASETS[dataset]}, ours and the paper's", "method", cells, str, note=note)


def _compared(ours: MeasuredRow | None, printed: float | None) -> dict[str, str]:
    value = None if ours is None else 100 * ours.accuracy.mean
    cells = {
        OURS: "–" if ours is None else f"{value:.2f} [{100 * ours.accuracy.low:.1f}, {100 * ours.accuracy.high:.1f}]"
    }
    if printed is not None:
        cells |= {PAPER: format_number(printed, 2), DIFFERENCE: "–" if value is None else _signed(value - printed)}
    return cells


def ablation_table(record: ReproductionRecord) -> ResultTable:
    """Table 3. Rows without a paper's value are ours."""
    network = record.backbones[0]
    rows = list(dict.fromkeys(row.row for row in record.of_part("table3")))
    cells: dict[tuple[str, str], str] = {}
    for row in rows:
        for dataset in SETS["table3"]:
            ours, printed = record.find("table3", dataset, network, row), printed_ablation(dataset, row)
            comparable = printed if network in BACKBONES else None
            columns = _compared(ours, None if comparable is None else comparable[0])
            columns[PAPER] = "–" if printed is None else f"{printed[0]:.2f} ± {printed[1]:g}"
            columns.setdefault(DIFFERENCE, "–")
            cells |= {(row, f"{DATASETS[dataset]} {heading}"): cell for heading, cell in columns.items()}
    shares = [row.majority for row in record.of_part("table3") if row.dataset == "pacs"]
    measured = f", here {32 * sum(shares) / len(shares):.1f}" if shares else ""
    note = (
        f"Accuracy in % on dirichlet:0.05, {backbone_title(network)}; the paper's is ViT-B/32. Of 32 images of PACS 29 "
        f"are of one class in the paper{measured}."
    )
    return grid_table("Table 3: ablation under class skew", "method", cells, str, note=note)


def skew_table(record: ReproductionRecord) -> ResultTable:
    """Numbers behind the chart of Figure 4."""
    return mark_best(_stream_table(record, "fig4", "Figure 4: accuracy against class skew", SILENT["fig4"]))


def sweep_table(record: ReproductionRecord) -> ResultTable:
    """The paper's rule with other values of mu and tau, which it does not print."""
    more = "The paper gives neither mu nor tau; no row is chosen by these labels."
    return _stream_table(record, "sweep", "The rule with other mu and tau", more)


def _stream_table(record: ReproductionRecord, part: str, title: str, more: str) -> ResultTable:
    """Methods by data sets and streams."""
    cells = {
        (row.row, f"{DATASETS[row.dataset]} {row.stream}"): 100 * row.accuracy.mean for row in record.of_part(part)
    }
    note = f"Accuracy in %, {backbone_title(record.backbones[0])}. {more}"
    return grid_table(title, "method", cells, lambda x: f"{x:.2f}", note=note)


def cost_table(record: ReproductionRecord) -> ResultTable:
    """Time and memory of one pass over all targets of PACS, beside the paper's."""
    memory = record.memory
    peak = "–" if memory is None else f"{memory.weights if memory.peak is None else memory.peak:.3g}"
    columns = {
        "method": lambda row: row.row,
        "seconds, ours": lambda row: format_number(row.seconds, 1),
        "seconds, paper": lambda row: f"{SECONDS:g}" if row.row == OWN_ROW else "–",
        "forward passes per image": lambda row: shown(row.forwards),
        "GB, ours": lambda row: peak if row.row == OWN_ROW else "–",
        "GB, paper": lambda row: f"{GIGABYTES:g}" if row.row == OWN_ROW else "–",
    }
    kind = (
        ""
        if memory is None
        else f" GB are of {'the experts’ weights' if memory.peak is None else 'the peak of a step'}"
    )
    where = "" if memory is None else f"{kind} with {memory.experts} experts on {memory.device}."
    note = f"All four targets of PACS, {backbone_title(record.backbones[0])}. The paper's are of one A100.{where}"
    return record_table("Cost of PACS", record.of_part("cost"), columns, note)


def expert_table(record: ReproductionRecord) -> ResultTable:
    columns = {
        "data set": lambda each: DATASETS[each.dataset],
        "network": lambda each: backbone_title(each.network),
        "domain": lambda each: each.domain,
        "seed": lambda each: str(each.seed),
        "accuracy %": lambda each: f"{100 * each.accuracy:.1f}",
        "validation loss": lambda each: f"{each.loss:.3f}",
        "best step": lambda each: str(each.steps),
        "recipes tried": lambda each: str(each.candidates),
    }
    return record_table("Experts on their own validation split", record.experts, columns)


def error_table(record: ReproductionRecord) -> ResultTable:
    """The decomposition of the averaged answers' error, and what averaging weights adds to it."""
    columns = {
        "data set": lambda each: DATASETS[each.dataset],
        "network": lambda each: backbone_title(each.network),
        "K": lambda each: str(each.parts.experts),
        "seeds": lambda each: str(each.parts.seeds),
        "bias": lambda each: f"{each.parts.bias:.3f}",
        "variance": lambda each: f"{each.parts.variance:.3f}",
        "covariance": lambda each: f"{each.parts.covariance:.3f}",
        "mean of answers": lambda each: f"{each.parts.averaged:.3f}",
        "locality": lambda each: f"{each.parts.merged - each.parts.averaged:+.3f}",
        "mean of weights": lambda each: f"{each.parts.merged:.3f}",
    }
    note = (
        "Squared error of probabilities, mean over targets of K experts each, i.i.d. stream. Mean of answers = bias + "
        "variance / K + (1 − 1/K) covariance, over training seeds: with one seed there is only bias. Locality: what "
        "the mean of weights adds to it."
    )
    return record_table("Decomposition of the error", record.theory, columns, note)


def theory_table(record: ReproductionRecord) -> ResultTable:
    """Data sets by claims: nine sets with two networks are too many columns for paper."""
    every = [finding for check in record.theory for finding in check.findings]
    findings = [(CLAIMS.get(each.measure) or CLAIMS[each.claim], each) for each in every]
    cells = {
        (str(each.stream), title): f"{format_estimate(each.estimate, each.unit)} {MARKS[each.verdict]}"
        for title, each in findings
        if each.estimate
    }
    about = {title: f"“{title}”: {each.claim} Measured: {each.measure}." for title, each in findings if each.estimate}
    return grid_table("Claims of the theory", "data set", cells, str, note=" ".join([NOTE, *about.values()]))


def theory_sentences(record: ReproductionRecord) -> list[str]:
    """Whether drift predicts failure, and claims without data."""
    drift = check_drift([point for check in record.theory for point in check.drift])
    shown = "" if drift.estimate is None else format_estimate(drift.estimate, drift.unit)
    sentences = [f"{drift.claim} {drift.reason or f'{drift.measure.capitalize()}: {shown}; {drift.verdict}.'}"]
    reasons = (finding for check in record.theory for finding in check.findings if finding.reason)
    unmeasured = grouped(reasons, "claim", "reason")
    for (claim, reason), own in unmeasured.items():
        sentences.append(f"{claim} Not measured on {', '.join(str(each.stream) for each in own)}. {reason}")
    return sentences


def summary(record: ReproductionRecord) -> list[str]:
    """How far the main comparison is from the paper, and how often the paper's method is the best in both."""
    columns = grouped(record.of_part("table1"), "dataset", "network")
    gaps, wins, printed_columns, printed_wins = list[float](), 0, 0, 0
    for (dataset, network), rows in columns.items():
        printed = {row: value for row in ROWS if (value := printed_accuracy(dataset, network, row)) is not None}
        gaps += [abs(100 * row.accuracy.mean - printed[row.row]) for row in rows if row.row in printed]
        best = max(row.accuracy.mean for row in rows)
        wins += [row.row for row in rows if row.accuracy.mean == best] == [OWN_ROW]
        printed_columns += bool(printed)
        printed_wins += bool(printed) and max(printed, key=printed.__getitem__) == OWN_ROW
    if not columns:
        return []
    sentences = [f"The paper's method is the best in {wins} of {len(columns)} measured columns of Tables 1 and 2."]
    if gaps:
        sentences += [
            f"In the paper it is the best in {printed_wins} of the {printed_columns} that it has.",
            f"Ours and the paper's accuracies are {sum(gaps) / len(gaps):.1f} points apart on average.",
        ]
    return sentences


def left_out(record: ReproductionRecord) -> list[str]:
    """What of the paper is not here, and why."""
    sentences = record.changes + [f"{place.title}: {place.problem}" for place in record.places if place.root is None]
    skipped = [title for part, title in PARTS.items() if part not in record.parts]
    sentences += [f"Not asked for (--only): {'; '.join(skipped)}."] if skipped else []
    asked = {place.name for place in record.places}
    unasked = [DATASETS[n] for n in DATASETS if n not in asked and any(n in SETS[part] for part in record.parts)]
    sentences += [f"Not asked for (--sets): {', '.join(unasked)}."] if unasked else []
    networks = [title for name, title in BACKBONES.items() if name not in record.backbones]
    sentences += [f"Not asked for (--backbones): {', '.join(networks)}."] if networks else []
    for part in record.parts:
        missing_sets = [p.title for p in record.places if p.root is None and p.name in SETS[part]]
        if missing_sets and part != "table1":
            sentences.append(f"{PARTS[part]} lacks {', '.join(missing_sets)}.")
    return [*sentences, *(text for part, text in SILENT.items() if part in record.parts)]


def _signed(points: float, digits: int = 2) -> str:
    return f"{round(points, digits) + 0.0:+.{digits}f}"
