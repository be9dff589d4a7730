"""The destinations of reports, read from a YAML file: what is sent where, and by which protocol."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergestream.runtime.errors import InputError, MergestreamError
from mergestream.runtime.option_checks import is_http_url, names, number, one_of, whole_number
from mergestream.runtime.yaml_file import read_yaml
from mergestream.serving.dicom_network.rules import ae_title
from mergestream.serving.http.tokens import require_private
from mergestream.serving.reports.report_pages import KINDS

C_STORE, STOW_RS = "c-store", "stow-rs"
NEEDED = {C_STORE: ("host", "port", "ae_title"), STOW_RS: ("url",)}
SECRETS = ("key_file", "token_file")
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Destination:
    """Where reports go: a DICOM node by C-STORE, or a DICOMweb server by STOW-RS."""

    name: str
    kind: str
    objects: tuple[str, ...] = ("sr",)
    host: str | None = None
    port: int = 104
    ae_title: str = ""  # of the receiver
    calling_ae_title: str = "MERGESTREAM"
    tls: bool = False
    ca_file: Path | None = None  # certificates that are trusted; None: those of this machine
    cert_file: Path | None = None  # own certificate, if the receiver asks for one
    key_file: Path | None = None
    url: str | None = None
    token_file: Path | None = None  # holds a bearer token, or 'user:password'

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", str(self.name)):
            raise InputError(f"a name has letters, digits, '-' and '_', at most 64; got {self.name!r:.80}.")
        one_of("kind", self.kind, (C_STORE, STOW_RS))
        object.__setattr__(self, "objects", names("objects", self.objects))
        for each in self.objects or ("",):
            one_of("objects", each, tuple(KINDS))
        for option in NEEDED[self.kind]:
            if getattr(self, option) in (None, ""):
                raise InputError(f"'{self.name}' is of kind {self.kind} and needs '{option}'.")
        if self.kind == C_STORE and (ae_title(self.ae_title), ae_title(self.calling_ae_title)):
            number("port", whole_number("port", self.port, low=1), high=65535)
        if self.url is not None and not is_http_url(self.url):
            raise InputError(f"'url' of '{self.name}' begins with http:// or https:// and holds no password.")
        for option in ("ca_file", "cert_file", *SECRETS):
            if (path := getattr(self, option)) is not None:
                object.__setattr__(self, option, Path(path))
                require_private(Path(path), 0o027 if option in SECRETS else 0, f"Others may read '{option}'.")


@dataclass(frozen=True)
class SendingPlan:
    """A destinations file."""

    destinations: tuple[Destination, ...] = ()
    give_up_days: float = 7.0  # after which a report counts as failed
    most_mib: int = 4096  # of reports that wait or failed; then new results wait in the node's inbox

    def __post_init__(self) -> None:
        number("give_up_days", self.give_up_days, above=0)
        whole_number("most_mib", self.most_mib, low=1)
        if len({each.name for each in self.destinations}) < len(self.destinations):
            raise InputError("two destinations have the same name.")


def read_destinations(file: Path) -> SendingPlan:
    """Read a destinations file; whatever is wrong with it is one sentence."""
    value = read_yaml(file, "--destinations", MOST_BYTES)
    try:
        if not isinstance(value, dict) or not isinstance(value.get("destinations"), list) or not value["destinations"]:
            raise InputError("it needs a list 'destinations' (docs/dicom_reports.md has an example).")
        listed = tuple(_built(Destination, each) for each in value["destinations"])
        return _built(SendingPlan, {**value, "destinations": listed})
    except (ValueError, MergestreamError) as error:
        raise InputError(f"--destinations {file}: {error}") from error


def _built(kind: type, value: Any) -> Any:
    if not isinstance(value, dict):
        raise InputError("a destination is a list of settings such as 'name: pacs'.")
    for key in value:
        one_of("setting", key, tuple(kind.__dataclass_fields__))  # type: ignore[attr-defined]
    if kind is Destination and (missing := [key for key in ("name", "kind") if key not in value]):
        raise InputError(f"a destination has no '{missing[0]}'.")
    return kind(**value)
