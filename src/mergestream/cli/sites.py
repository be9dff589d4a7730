"""`mergestream choose`, `site-report` and `matrix`: parse, call one function, print."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mergestream.cli import shared_options
from mergestream.cli.terminal import command_text, print_result, progress, show_result


def choose(
    pool: Annotated[Path, typer.Argument(help="The pool: a folder of expert folders.")],
    parts: Annotated[list[Path] | None, typer.Argument(help="Sites' own parts or site reports, with --join.")] = None,
    dataset: shared_options.OptionalDatasetName = None,
    root: shared_options.Root = None,
    site: Annotated[str, typer.Option(help="The site to measure as a pseudo-target, or all.")] = "all",
    out: Annotated[
        Path | None, typer.Option(help="Write the measured part to this JSON file; needed with one site.")
    ] = None,
    join: Annotated[bool, typer.Option("--join", help="Choose from the parts in these files.")] = False,
    nested: shared_options.Nested = False,
    require_signed_by: shared_options.RequireSignedBy = None,
    data_option: shared_options.DataOption = None,
    skip_bad: shared_options.SkipBad = 0,
    allow_missing_classes: shared_options.AllowMissingClasses = False,
    jobs: Annotated[int, typer.Option(help="Processes on this machine.")] = 1,
    device: shared_options.Device = "auto",
    plugin: shared_options.Plugin = None,  # noqa: ARG001
    as_json: shared_options.AsJson = False,
) -> None:
    """Choose the method that suits a pool, on its own sites as pseudo-targets, and record it in pool.json.

    Each site's validation images are answered by the other sites' experts. A site can measure its part alone: its
    file holds numbers, no images. The method 'auto' uses the recommendation.
    """
    from mergestream.bench.choice.choice_run import choice_table, describe_choice, run_choice
    from mergestream.data.datasets import DataRequest

    if join != bool(parts):
        raise typer.BadParameter("Write --join and the files of the sites' parts, or neither.")
    limits = {"skip_bad": skip_bad, "allow_missing_classes": allow_missing_classes}
    evidence, choice = run_choice(
        pool,
        None if dataset is None else DataRequest.parse(dataset, root, data_option, **limits),
        parts or (),
        site=site,
        out=out,
        nested=nested,
        require_signed_by=require_signed_by,
        device=device,
        jobs=jobs,
        track=progress(stderr=as_json),
    )
    if choice is None:
        print_result(as_json, evidence.to_json(), [f"Part of {site}: {out}"])
        return
    files = {"Part": out} if out else {}
    tables, sentences = [choice_table(choice, evidence)], describe_choice(choice)
    show_result(as_json, asdict(choice), tables, sentences, {**files, "Recorded in": pool / "pool.json"})


def site_report(
    pool: Annotated[Path, typer.Argument(help="The pool: a folder of expert folders.")],
    dataset: Annotated[str, typer.Option(help="This site's images: a data set by its name in 'data list'.")],
    out: Annotated[Path, typer.Option(help="The JSON file to write. It holds masked counts, no images.")],
    root: shared_options.Root = None,
    domain: Annotated[
        str | None, typer.Option(help="This site's domain in the data set.", show_default="the only one")
    ] = None,
    site: Annotated[str | None, typer.Option(help="The site's name.", show_default="the domain's")] = None,
    key: Annotated[
        Path | None, typer.Option(help="Sign the file with this private key, as 'pool key' writes one: OUT.sig.")
    ] = None,
    nested: shared_options.Nested = False,
    data_option: shared_options.DataOption = None,
    skip_bad: shared_options.SkipBad = 0,
    allow_missing_classes: shared_options.AllowMissingClasses = False,
    device: shared_options.Device = "auto",
    plugin: shared_options.Plugin = None,  # noqa: ARG001
    as_json: shared_options.AsJson = False,
) -> None:
    """Measure a pool's experts and the candidates of 'choose' on this site's own labelled images.

    The file holds masked counts and rounded means only, so that it can leave the site. An expert of this site is
    measured on the images that its training held out.
    """
    from mergestream.bench.sites.site_matrix import describe_report, report_table
    from mergestream.bench.sites.site_measurement import report_site
    from mergestream.data.datasets import DataRequest
    from mergestream.pool.trust.signatures import sign_file
    from mergestream.training.training_run import work_folder

    limits = {"skip_bad": skip_bad, "allow_missing_classes": allow_missing_classes}
    data, folder = DataRequest.parse(dataset, root, data_option, **limits), pool.resolve()
    which, track = {"domain": domain, "site": site}, progress(stderr=as_json)
    report = report_site(folder, data, work_folder(folder), track, **which, device=device, nested=nested)
    report.save(out)
    files = {"Report": out} | ({"Signature": sign_file(out, key)} if key else {})
    show_result(as_json, report.to_json(), [report_table(report)], describe_report(report), files)


def matrix(
    reports: Annotated[list[Path], typer.Argument(help="The sites' reports: files of 'mergestream site-report'.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("matrix.html"),
    require_signed_by: shared_options.RequireSignedBy = None,
    as_json: shared_options.AsJson = False,
) -> None:
    """Show who answers well where: every expert at every site, from the sites' reports alone."""
    from mergestream.bench.sites.matrix_page import write_matrix
    from mergestream.bench.sites.site_matrix import describe_matrix, matrix_table, scores_by_site
    from mergestream.bench.sites.site_report import read_reports

    read, signers = read_reports(reports, require_signed_by)
    write_matrix(read, out, command_text(), signers)
    tables, sentences = [matrix_table(read)], describe_matrix(read)
    show_result(as_json, scores_by_site(read), tables, sentences, {"Page": out})
