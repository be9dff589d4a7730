"""A study pulled from another system by WADO-RS, with dicomweb-client. Sources are those of the rules file."""

import io
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mergestream.runtime.errors import InputError, MergestreamError
from mergestream.serving.dicom_network.rules import Source

if TYPE_CHECKING:
    from mergestream.serving.dicom_network.reception import Reception, Stored

NOT_FOUND = 404
GROUP = 32  # objects that are flushed to disk together


class SourceError(MergestreamError):
    """The source cannot be reached, or its answer cannot be read."""


def pull_study(source: Source, study: str, reception: "Reception") -> "list[Stored]":
    """Retrieve all objects of a study into the inbox. The sender's title, for the rules, is the source's name."""
    stored, group = list["Stored"](), list[bytes]()
    for data in _retrieved(source, study):
        group.append(data)
        if len(group) == GROUP:
            stored += reception.store_files(group, source.name)
            group = []
    return stored + reception.store_files(group, source.name)


def _retrieved(source: Source, study: str) -> Iterator[bytes]:
    """The objects as DICOM files. Messages of the libraries may quote them, so none is passed on."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for dataset in _client(source).iter_study(study, media_types=(("application/dicom", "*"),)):
                file = io.BytesIO()
                dataset.save_as(file, enforce_file_format=True)
                yield file.getvalue()
    except MergestreamError:
        raise
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = f"it answered with HTTP status {status}" if status else type(error).__name__
        raise SourceError(
            "The source has no such study." if status == NOT_FOUND else f"The source failed: {reason}."
        ) from None


def _client(source: Source) -> Any:
    try:
        from mergestream.serving.dicom_network.web_session import new_client
    except ModuleNotFoundError as error:
        raise InputError(f"Pulling studies needs {error.name}: pip install 'mergestream[dicom]'.") from error
    return new_client(source.url, source.token_file)
