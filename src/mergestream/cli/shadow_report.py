"""`mergestream shadow-report`: parse, call one function, print."""

from pathlib import Path
from typing import Annotated

import typer

from mergestream.cli.shared_options import AsJson
from mergestream.cli.terminal import print_result


def shadow_report(
    state: Annotated[Path, typer.Argument(help="The --state folder of a service that ran with --shadow.")],
    readings: Annotated[
        Path | None, typer.Option(help="A CSV file: class, and sop_instance_uid or accession. It stays here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the answers of shadow mode with the site's readings, week by week; without readings, count them."""
    from mergestream.serving.reports.shadow_agreement import in_words
    from mergestream.serving.reports.shadow_agreement import shadow_report as compared

    report = compared(state, readings)
    print_result(as_json, report, in_words(report))
