"""mergestream audit …: parse, call one function, print."""

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mergestream.cli.shared_options import AsJson, Plugin
from mergestream.cli.terminal import echo, print_result, progress

if TYPE_CHECKING:
    from mergestream.serving.audit.keys import PublicKey

audit = typer.Typer(
    help="The service's audit log: verify it, anchor it, replay its steps, trace an expert's answers, make a key.",
    no_args_is_help=True,
)

Log = Annotated[Path, typer.Argument(help="The log; its rotated files LOG.000001, … are beside it.")]


TIMES = ["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%dT%H:%M:%S.%fZ"]


def _public_key(file: Path | None) -> "PublicKey | None":
    if file is None:
        return None
    from mergestream.serving.audit.keys import read_public_key

    return read_public_key(file)


@audit.command("verify")
def verify_log(
    log: Log,
    key: Annotated[Path | None, typer.Option(help="The site's public key (.pub), to check the signatures.")] = None,
    anchor: Annotated[
        Path | None, typer.Option(help="What 'audit head' printed earlier: without it a cut tail is not noticed.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find every changed, removed, repeated, inserted or moved line. Exit code 1 if there is one."""
    from mergestream.serving.audit.log_verification import in_words, read_anchor, verify

    report = verify(log, _public_key(key), read_anchor(anchor) if anchor else None)
    print_result(as_json, report.to_json(), in_words(report), ok=report.sound)


@audit.command("head")
def print_head(log: Log) -> None:
    """Print the anchor of the log so far, as JSON: number, hash, time and signature of its last line.

    Store it where those who can write the log cannot change it, and give it to 'audit verify --anchor'.
    """
    from mergestream.serving.audit.log_verification import head

    print_result(True, asdict(head(log)))


@audit.command("replay")
def replay_log(
    log: Log,
    images: Annotated[Path, typer.Option(help="A folder with the images as they were sent, under any names.")],
    pool: Annotated[
        list[Path],
        typer.Option(
            help="The pool's folder as it was then; repeat it for one that changed while the log was written."
        ),
    ],
    step: Annotated[
        int | None, typer.Option(help="Only the step on the line with this sequence number.", show_default="all")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="How far numbers may differ, as on other hardware.")] = 0.0,
    plugin: Plugin = None,  # noqa: ARG001
    as_json: AsJson = False,
) -> None:
    """Compute steps again from their images and compare the results with the log. Exit code 1 if one differs.

    Bit for bit the same on the same hardware, versions and settings. Run 'audit verify' first.
    """
    from mergestream.pool.expert_pool import ExpertPool
    from mergestream.serving.audit.replay import in_words, replay
    from mergestream.serving.engine.recomputation import Reproducer

    reproducer = Reproducer(*(ExpertPool.load(each, keep_revoked=True) for each in pool))
    report = replay(log, images, reproducer, sequence=step, tolerance=tolerance, track=progress(stderr=True))
    print_result(as_json, report.to_json(), in_words(report), ok=report.reproduced)


@audit.command("touched")
def list_touched(
    logs: Annotated[list[Path], typer.Argument(help="Logs, as of several replicas; rotated files are beside them.")],
    expert: Annotated[str, typer.Option(help="The expert's name in the pool.")],
    since: Annotated[datetime | None, typer.Option(formats=TIMES, help="Only answers from this time on (UTC).")] = None,
    sha256: Annotated[
        str, typer.Option(help="Only the expert with these weights: the first digits of their hash.")
    ] = "",
    key: Annotated[Path | None, typer.Option(help="The site's public key (.pub), to check the signatures.")] = None,
    as_json: AsJson = False,
) -> None:
    """List every answer that an expert contributed to, with its coefficient, images and predictions.

    The logs are verified first; the pool is not needed.
    """
    from mergestream.serving.audit import expert_recall

    start = "" if since is None else since.isoformat(timespec="microseconds") + "Z"
    recall = expert_recall.touched(logs, expert, since=start, sha256=sha256.lower(), key=_public_key(key))
    for line in expert_recall.as_json(recall) if as_json else expert_recall.in_words(recall):
        echo(line)


@audit.command("key")
def make_key(file: Annotated[Path, typer.Argument(help="A new file; the public half is written to FILE.pub.")]) -> None:
    """Make the Ed25519 key pair that signs the audit log. Nothing is overwritten."""
    from mergestream.serving.audit.keys import create_key

    echo(*map(str, create_key(file)))
