"""Replace a file in one step: a reader, or a run after a crash, sees the old file or the whole new one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from megatron_dta.errors import UsageError


@contextmanager
def replaced(path: str | Path) -> Iterator[IO[bytes]]:
    """Yield a binary file beside `path` that takes its name, synced to disk, unless the body raises."""
    path = Path(path)
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    _sync_folder(path.parent)


def _umask() -> int:
    # the mask can only be read by setting it
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole; raise UsageError where that is not possible."""
    try:
        with replaced(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(f"{path}: cannot write ({error.strerror})") from None
