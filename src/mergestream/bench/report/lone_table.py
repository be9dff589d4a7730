"""The table of lone positives: how often the one image of a rare class in a batch is recognised."""

from collections import defaultdict

import numpy as np

from mergestream.bench.analysis.bench_findings import BenchFindings
from mergestream.bench.report.result_table import ResultTable, format_number, grid_table, mark_best


def lone_tables(findings: BenchFindings) -> list[ResultTable]:
    """Methods by streams of lone positives; no table if there are none."""
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in findings.runs:
        if line["method"] != "single_expert" and line.get("lone_sensitivity") is not None:
            values[line["label"], line["stream"]].append(line["lone_sensitivity"])
    if not values:
        return []
    note = (
        "Recall of the rare class in %, of which no batch has more than one image; mean over targets, seeds and pools."
    )
    means = {cell: float(np.mean(own)) for cell, own in values.items()}
    title = "Sensitivity of the lone positive"
    return [mark_best(grid_table(title, "method", means, lambda each: format_number(each, 1, 100), note=note), ())]
