"""Arrays in .npy, .npz and .hdf5 files, read without the rest of the file. Pickles are refused."""

import zipfile
from importlib import import_module
from typing import Any, BinaryIO

import numpy as np

from mergestream.data.datasets.roots import Root
from mergestream.runtime.errors import DataError


def read_array(root: Root, file: str, name: str) -> np.ndarray:
    """Read a named array of an .npz or .hdf5 file; `name` is not used for an .npy file."""
    with root.open(file) as content:
        try:
            if _is_hdf5(file):
                with _hdf5(content) as opened:
                    return np.asarray(opened[name])
            loaded = np.load(content, allow_pickle=False)
            return loaded if isinstance(loaded, np.ndarray) else loaded[name]
        except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise _unreadable(root, file, name, error) from error


def array_shape(root: Root, file: str, name: str) -> tuple[int, ...]:
    """Read the shape of a named array of an .npz or .hdf5 file from its header."""
    with root.open(file) as content:
        try:
            if _is_hdf5(file):
                with _hdf5(content) as opened:
                    return tuple(opened[name].shape)
            with zipfile.ZipFile(content) as archive, archive.open(f"{name}.npy") as member:
                version = np.lib.format.read_magic(member)
                read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                return tuple(read[version](member)[0])
        except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise _unreadable(root, file, name, error) from error


def _is_hdf5(file: str) -> bool:
    return file.lower().endswith((".hdf5", ".h5"))


def _hdf5(content: BinaryIO) -> Any:
    return needed_library("h5py", "Reading .hdf5").File(content, "r")


def needed_library(name: str, purpose: str, extra: str = "data") -> Any:
    """Import an optional library; the error says what it is needed for, and how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise DataError(f"{purpose} needs {name.split('.')[0]}: pip install 'mergestream[{extra}]'.") from error


def _unreadable(root: Root, file: str, name: str, error: Exception) -> DataError:
    return DataError(f"Cannot read the array '{name}' of {file} in {root.location}: {error}.")
