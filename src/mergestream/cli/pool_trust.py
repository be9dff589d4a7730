"""`mergestream pool key`, `sign`, `remove` and `revoke`: keys and signatures of a consortium."""

from pathlib import Path
from typing import Annotated

import typer

from mergestream.cli.pool import Pool
from mergestream.cli.shared_options import AsJson, RequireSignedBy
from mergestream.cli.terminal import echo, print_result

Key = Annotated[Path, typer.Option(help="The site's private key (PEM, elliptic curve), made by 'pool key' or openssl.")]
Certificate = Annotated[Path | None, typer.Option(help="The key's certificate (PEM), where an authority issued one.")]
Chain = Annotated[list[Path] | None, typer.Option(help="A certificate between that one and the authority; repeatable.")]


def make_key(file: Annotated[Path, typer.Argument(help="A new file; the public half is written to FILE.pub.")]) -> None:
    """Make the key pair that signs a site's experts (P-256). Nothing is overwritten."""
    from mergestream.pool.trust.signatures import create_signing_key

    echo(*map(str, create_signing_key(file)))


def sign(
    expert: Annotated[Path, typer.Argument(help="The folder of an expert, a base or a merged model.")],
    key: Key,
    certificate: Certificate = None,
    chain: Chain = None,
) -> None:
    """Sign every file of an expert's folder: weights, card, statistics, README.md. Writes model.sig beside them."""
    from mergestream.pool.trust.signatures import sign_expert

    echo(f"Signed: {sign_expert(expert, key, certificate, chain or ())}")


def remove(
    folder: Pool, expert: Annotated[str, typer.Argument(help="The expert's name in the pool.")], as_json: AsJson = False
) -> None:
    """Take an expert out of the pool. It is kept as a version."""
    from mergestream.pool.exchange.changes import remove_expert

    version = remove_expert(folder, expert)
    lines = [f"'{expert}' is no longer in the pool; it is kept as version {version}."]
    print_result(as_json, {"expert": expert, "kept_version": version}, lines)


def revoke(
    folder: Pool,
    expert: Annotated[str, typer.Argument(help="The expert's name in the pool.")],
    key: Key,
    reason: Annotated[str, typer.Option(help="Why, in one sentence; it is shown to all sites.")],
    certificate: Certificate = None,
    chain: Chain = None,
    require_signed_by: RequireSignedBy = None,
    as_json: AsJson = False,
) -> None:
    """Write an expert into the pool's signed list of revocations, revoked.json. Services stop using it."""
    from mergestream.pool.trust.revocations import revoke_expert

    revocations = revoke_expert(
        folder,
        expert,
        key=key,
        reason=reason,
        certificate=certificate,
        chain=chain or (),
        require_signed_by=require_signed_by,
    )
    line = (
        f"'{expert}' is revoked, in version {revocations.version} of the list. Send revoked.json and revoked.json.sig."
    )
    print_result(as_json, revocations.to_json(), [line])
