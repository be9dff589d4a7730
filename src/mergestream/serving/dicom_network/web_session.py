"""Clients of other DICOMweb systems: no settings of the environment, no redirects, no retries, and a time limit."""

from pathlib import Path
from typing import Any

import requests
from dicomweb_client import DICOMwebClient
from requests.adapters import HTTPAdapter

SECONDS = (10.0, 60.0)  # to connect, and between two packets


class _ImpatientAdapter(HTTPAdapter):
    def send(self, *arguments: Any, **options: Any) -> Any:
        return super().send(*arguments, **{**options, "timeout": SECONDS})


def new_client(
    url: str, token_file: Path | None, *, ca_file: Path | None = None, own_cert: tuple[Path, Path] | None = None
) -> DICOMwebClient:
    """`token_file` holds a bearer token, or 'user:password'. `own_cert`: certificate and key of this side."""
    session = requests.Session()
    session.trust_env = False  # no password from a .netrc file, no proxy of the environment
    session.max_redirects = 0  # another address than that of the site's file is never asked
    for scheme in ("http://", "https://"):
        session.mount(scheme, _ImpatientAdapter())
    session.verify = True if ca_file is None else str(ca_file)
    session.cert = own_cert and (str(own_cert[0]), str(own_cert[1]))
    secret = "" if token_file is None else token_file.read_text(encoding="utf-8").strip()
    user, colon, password = secret.partition(":")
    if colon:
        session.auth = (user, password)
    elif secret:
        session.headers["Authorization"] = f"Bearer {secret}"
    client = DICOMwebClient(url, session=session)
    client.set_http_retry_params(retry=False)
    return client
