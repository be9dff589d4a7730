"""The DICOM Conformance Statement says what the code does."""

import csv
import re
from pathlib import Path

import pytest
from pydicom.uid import UID

from benching import write_pool
from mergestream.serving.dicom_network import dimse
from mergestream.serving.dicom_network.association import REQUEST_SECONDS
from mergestream.serving.dicom_network.inbox import IMPLEMENTATION_NAME, IMPLEMENTATION_UID
from mergestream.serving.dicom_network.negotiation import SYNTAXES, VERIFICATION, image_classes
from mergestream.serving.dicom_network.rules import NodeLimits
from mergestream.serving.reports import senders
from mergestream.serving.reports.report_pages import KINDS
from services import LocalService

SYNTAX = "1.2.840.10008.1.2"
DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "conformance.md").read_text(encoding="utf-8")


def table(heading: str) -> dict[str, str]:
    """The first table below a heading: the second column's code by the first column."""
    section = TEXT.partition(f"{heading}\n")[2].partition("\n#")[0]
    return dict(re.findall(r"^\| ([^|]+) \| `?([^|`]+)`? ", section, flags=re.MULTILINE))


def test_classes_and_transfer_syntaxes_are_those_of_the_code() -> None:
    with (DOCS / "conformance.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    classes, syntaxes = (
        {row["UID"] for row in rows if row["kind"] == kind} for kind in ("SOP class", "transfer syntax")
    )
    assert classes == image_classes() | {VERIFICATION}
    assert syntaxes == SYNTAXES
    assert all(UID(row["UID"]).name == row["name"] for row in rows)
    assert f"({len(image_classes())} classes" in TEXT
    assert f"the {len(image_classes())} storage classes of images in [conformance.csv]" in TEXT
    assert f"The {len(SYNTAXES)} in [conformance.csv]" in TEXT


def test_statuses_and_properties_are_those_of_the_code() -> None:
    section = TEXT.partition("#### 4.2.3")[2].partition("\n###")[0]
    names = ("SUCCESS", "OUT_OF_RESOURCES", "MISMATCH", "CANNOT_UNDERSTAND", "NO_RULE", "NOT_SUPPORTED")
    assert {int(code, 16) for code in re.findall(r"^\| `(\w+)`", section, flags=re.MULTILINE)} == {
        getattr(dimse, name) for name in names
    }
    properties = table("### 4.1 Common properties")
    assert properties["implementation class UID"] == IMPLEMENTATION_UID
    assert properties["implementation version name"] == IMPLEMENTATION_NAME
    limits = NodeLimits()
    assert properties["largest PDU received"].startswith(f"{limits.pdu_kib} KiB")
    assert properties["associations at a time"].startswith(str(limits.associations))
    assert properties["association without a message"].startswith(f"ended after {limits.idle_seconds:.0f} s")
    assert f"must arrive within {REQUEST_SECONDS:.0f} s" in TEXT


def test_what_is_sent_is_that_of_the_code() -> None:
    section = TEXT.partition("### 4.3")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| `([\d.]+)` \| ([^|]+) \|", section, flags=re.MULTILINE)
    assert {uid for _, uid, _ in rows} == {kind.sop_class for kind in KINDS.values()}
    for name, uid, syntaxes in rows:
        assert UID(uid).name == name
        assert syntaxes == ", ".join(UID(each).name for each in senders.SYNTAXES)


def test_a_node_accepts_every_class_and_syntax_and_nothing_else(tmp_path: Path) -> None:
    pynetdicom = pytest.importorskip("pynetdicom")
    write_pool(tmp_path / "pool")
    with LocalService(tmp_path / "pool", tmp_path / "state", dicom_port=0) as service:
        port = int(re.findall(r"DICOM node: .* port (\d+)", service.words())[0])
        every, report = sorted(image_classes()), "1.2.840.10008.5.1.4.1.1.88.33"
        for uids, syntaxes in (([*every, VERIFICATION, report], [SYNTAX]), (every[:1], sorted(SYNTAXES))):
            entity = pynetdicom.AE()
            entity.requested_contexts = [pynetdicom.build_context(u, [s]) for u in uids for s in syntaxes]
            association = entity.associate("127.0.0.1", port, ae_title="MERGESTREAM")
            assert association.is_established
            accepted = {(each.abstract_syntax, each.transfer_syntax[0]) for each in association.accepted_contexts}
            association.release()
            assert accepted == {(uid, syntax) for uid in uids for syntax in syntaxes if uid != report}
