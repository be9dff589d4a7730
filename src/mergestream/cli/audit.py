"""mergestream audit …: parse, call one function, print."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mergestream.cli.shared_options import AsJson

audit = typer.Typer(
    help="The service's audit log: was it changed, how far does it go, does a step come out the same again.",
    no_args_is_help=True,
)

Log = Annotated[Path, typer.Argument(help="The log; its rotated files LOG.000001, … lie beside it.")]


@audit.command("verify")
def verify_log(
    log: Log,
    key: Annotated[
        Path | None, typer.Option(help="The site's public key (.pub) or secret, to check the signatures.")
    ] = None,
    anchor: Annotated[
        Path | None, typer.Option(help="What 'audit head' printed earlier: without it a cut tail cannot be seen.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find every changed, removed, repeated, inserted or moved line. Exit code 1 if there is one."""
    from mergestream.serving.audit.anchors import read_anchor
    from mergestream.serving.audit.keys import read_verifier
    from mergestream.serving.audit.verification import in_words, verify

    report = verify(log, read_verifier(key) if key else None, read_anchor(anchor) if anchor else None)
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else "\n".join(in_words(report)))
    if not report.sound:
        raise typer.Exit(1)


@audit.command("head")
def print_head(log: Log) -> None:
    """Print the anchor of the log so far, as JSON: number, hash, time and signature of its last line.

    Keep it where whoever can write the log cannot reach it, and give it to 'audit verify --anchor'.
    """
    from mergestream.serving.audit.anchors import head

    typer.echo(json.dumps(head(log).to_json(), indent=2))


@audit.command("replay")
def replay_log(
    log: Log,
    images: Annotated[Path, typer.Option(help="A folder with the images as they were sent, under any names.")],
    pool: Annotated[Path, typer.Option(help="The pool's folder as it was then; its hash is in the log.")],
    step: Annotated[
        int | None, typer.Option(help="Only the step on the line with this sequence number.", show_default="all")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="How far a number may be off, as on other hardware.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Compute steps again from their images and compare all that was logged. Exit code 1 if one differs.

    Bit for bit the same on the same hardware, versions and settings. Run 'audit verify' first.
    """
    from mergestream.cli.terminal import progress
    from mergestream.serving.audit.replay import in_words, replay
    from mergestream.serving.engine.reproducing import Reproducer

    track = progress(Console(stderr=True))
    report = replay(log, images, Reproducer(pool), sequence=step, tolerance=tolerance, track=track)
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else "\n".join(in_words(report)))
    if not report.reproduced:
        raise typer.Exit(1)


@audit.command("key")
def make_key(
    file: Annotated[Path, typer.Argument(help="A new file; with --ed25519 the public half goes to FILE.pub.")],
    ed25519: Annotated[
        bool, typer.Option("--ed25519/--hmac", help="Verified with a public key, or with the same secret.")
    ],
) -> None:
    """Make the key that the service signs with, readable by you alone. Nothing is overwritten."""
    from mergestream.serving.audit.keys import create_key

    for path in create_key(file, ed25519=ed25519):
        typer.echo(str(path))
