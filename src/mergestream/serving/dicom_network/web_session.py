"""HTTP sessions with other DICOMweb systems: no settings of the environment, no redirects, and a time limit."""

from typing import Any

import requests
from requests.adapters import HTTPAdapter

SECONDS = (10.0, 60.0)  # to connect, and between two packets


class _ImpatientAdapter(HTTPAdapter):
    def send(self, *arguments: Any, **options: Any) -> Any:
        return super().send(*arguments, **{**options, "timeout": SECONDS})


def new_session() -> requests.Session:
    session = requests.Session()
    session.trust_env = False  # no password from a .netrc file, no proxy of the environment
    session.max_redirects = 0  # another address than that of the site's file is never asked
    for scheme in ("http://", "https://"):
        session.mount(scheme, _ImpatientAdapter())
    return session
