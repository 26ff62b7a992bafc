"""NumPy files from anywhere: what their headers claim is checked before anything is read, and nothing is unpickled."""

import io
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np


class Header(NamedTuple):
    """What a .npy file says it holds, and where its numbers begin."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize  # exact: Python's whole numbers do not overflow


class Refused(ValueError):
    """A file that is not what it should be, with a message that says so."""


def read_header(file: BinaryIO | Any, name: str, num_bytes: int) -> Header:
    """The header of a .npy file of `num_bytes` bytes: real numbers or flags, exactly as many as it has room for."""
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran_order, dtype = read(file)
        header = Header(shape=shape, fortran_order=fortran_order, dtype=dtype, offset=file.tell())
        if any(size < 0 for size in header.shape):
            raise TypeError(f"shape {header.shape}")
    except Exception as error:  # whatever a damaged header makes the parser raise, the file is at fault
        raise Refused(f"{name} cannot be read: truncated, damaged or not a .npy file ({error})") from error
    if header.dtype.hasobject or header.dtype.kind not in "biuf":
        raise Refused(f"{name} must hold real numbers, got dtype {header.dtype} (Python objects are never loaded)")
    if header.offset + header.nbytes != num_bytes:
        raise Refused(
            f"{name} cannot be read: shape {header.shape} of {header.dtype} takes {header.nbytes} bytes, "
            f"the file has {num_bytes - header.offset}"
        )
    return header


class Column:
    """An array in a .npy file, of which only the rows asked for are ever in memory.

    The file is mapped anew for each reading: pages that stay mapped would count as the memory of the process until all
    of the file is in it.
    """

    def __init__(self, path: Path, name: str):
        with open(path, "rb") as file:
            self._header = read_header(file, name, path.stat().st_size)
        self._path = path
        self.shape, self.dtype, self.ndim = self._header.shape, self._header.dtype, len(self._header.shape)

    def __getitem__(self, rows: Any) -> np.ndarray:
        return np.array(self.mapped()[rows], subok=False)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[...], dtype)

    def mapped(self) -> np.ndarray:
        """All of it, as a read-only memory map."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        order = "F" if self._header.fortran_order else "C"
        return np.memmap(self._path, self.dtype, "r", self._header.offset, self.shape, order)


def archived_arrays(path: Path, max_bytes: int) -> Iterator[tuple[str, np.ndarray]]:
    """Name and contents of every array of a .npz file that is not larger than `max_bytes` when unpacked.

    The sizes in the directory of the archive are looked at first. No member can be longer than its entry there says
    (zipfile reads no further, and the checksum then fails), and no array larger than its member.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            total = sum(member.file_size for member in members)
            if total > max_bytes:
                raise Refused(
                    f"{path} unpacks to {total} bytes, more than max_bytes={max_bytes}; a folder of .npy files is read "
                    "in parts, whatever its size"
                )
            names = [member.filename for member in members]
            if len(set(names)) < len(names):
                raise Refused(f"{path} holds two arrays of one name: {sorted(names)}")
            for member in members:
                if not member.filename.endswith(".npy"):
                    raise Refused(f"{path} must hold .npy arrays only, got {member.filename!r}")
                data = archive.read(member)
                name = member.filename.removesuffix(".npy")
                header = read_header(io.BytesIO(data), f"{name} of {path}", len(data))
                flat = np.frombuffer(data, header.dtype, offset=header.offset)
                yield name, flat.reshape(header.shape, order="F" if header.fortran_order else "C")
    except (OSError, Refused):
        raise
    except Exception as error:  # zipfile and its decompressors have many names for a damaged archive
        raise Refused(f"{path} cannot be read: truncated, damaged or not a .npz file ({error})") from error
