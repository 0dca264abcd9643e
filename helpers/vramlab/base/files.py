"""Files of others read with care, and our own written as a whole or not at all."""

import codecs
import contextlib
import io
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from .errors import FileError

MiB = 1024**2
MOST_TEXT = 64 * MiB  # of a configuration, a script, a list, a report or a log
MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}

NOT_OURS = "vramlab did not write the file that is there: take another name, or remove it"
# How files of ours begin.
PROGRAM = b"\nWritten by vramlab "
REPORT = b'{\n  "source": "'
PICKLE = b"\x80"


def read_bytes(
    path: str | os.PathLike,
    most: int = MOST_TEXT,
) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    A FIFO, a device or a folder is refused before anything of it is read: it could block for ever
    or have no end. Raises FileError, or the OSError or ValueError of `os.open`, as for a file that
    does not exist.
    """
    with _opened(path) as file:
        # Of the open file and not of its path, which could be another by now.
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > most else file.read(size + MiB)  # some of /proc say 0
        if max(size, len(content)) > most:
            limit = f"{most // MiB:,} MiB, the most that is read of such a file"
            raise FileError(f"{path} is larger than {limit}.")
        return content


def _opened(path: str | os.PathLike) -> BinaryIO:
    """Return a regular file opened to be read. Raises FileError or OSError as `read_bytes`."""
    if os.path.isdir(path):  # Windows opens none
        raise FileError(f"{path} is a folder, and a file is asked for.")
    not_blocking = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    file = open(os.open(path, os.O_RDONLY | not_blocking), "rb")  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    kinds = "it is a device, a pipe or a socket"
    raise FileError(f"{path} is no regular file ({kinds}), so it is not read.")


def is_ours(path: str | os.PathLike) -> bool:
    """Tell whether a file begins as one that vramlab writes.

    That is a program, a report, or a memory snapshot's pickle.
    """
    try:
        with _opened(path) as file:
            head = file.read(4096)
    except OSError:
        return False
    return PROGRAM in head or head.startswith((REPORT, PICKLE))


def read_text(
    path: str | os.PathLike,
    most: int = MOST_TEXT,
    errors: str = "strict",
) -> str:
    """Return the text of a file in UTF-8, or in UTF-16 with a mark.

    PowerShell's redirection writes UTF-16. `errors` says what becomes of other bytes, as in
    `bytes.decode`. Raises FileError for what is no text, and as `read_bytes`.
    """
    content = read_bytes(path, most)
    # A mark is at the very beginning, and a file without one is UTF-8.
    marked = (encoding for mark, encoding in MARKS.items() if content.startswith(mark))
    encoding = next(marked, "utf-8")
    try:
        text = content.decode(encoding, errors)
    except UnicodeDecodeError as error:
        why = f"{error.reason} at byte {error.start:,}"
        raise FileError(f"{path} is no text in UTF-8 ({why}).") from None
    return io.StringIO(text, newline=None).read()  # each end of a line as \n


def strict_json(text: str | bytes) -> Any:
    """Return what the JSON `text` says.

    Raises ValueError for what is none: NaN and infinite numbers, a name twice in an object and too
    deep a nesting included.
    """
    try:
        return json.loads(
            text,
            parse_constant=_no_constant,
            parse_float=_finite,
            object_pairs_hook=_once,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if abs(number) == float("inf"):
        raise ValueError(f"{text} is no number that a computer has")
    return number


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object says {twice!r} twice")
    return values


def write_files(files: Mapping[Path, str | bytes]) -> None:
    """Write all `files` so that a reader sees the old content of each or the new, never a part.

    A link stays a link, and a file keeps its permissions. Raises FileError; what was there is then
    as it was before.
    """
    with contextlib.ExitStack() as stack:
        ready = []
        for path, content in files.items():
            with _naming(path):
                # A link's target is replaced, so that the link stays.
                target = Path(os.path.realpath(path))
                _check_target(target)
                # a name that nobody knows before, so that nobody can put a link there
                temporary = target.with_name(f".vramlab-{os.urandom(8).hex()}.part")
                stack.callback(temporary.unlink, missing_ok=True)
                _write_new(temporary, content, like=target)
                ready.append((path, temporary, target))
        for path, temporary, target in ready:
            with _naming(path):
                temporary.replace(target)


def write_atomically(
    path: str | os.PathLike,
    content: str | bytes,
) -> None:
    """Write one file as `write_files` does. Raises FileError."""
    write_files({Path(path): content})


def _check_target(target: Path) -> None:
    """Raise OSError where what would be replaced is no file, or may not be changed."""
    if target.exists() and not target.is_file():
        raise OSError("it is no regular file")
    if target.exists() and not os.access(target, os.W_OK):
        raise OSError("it may not be written to")


def _write_new(
    path: Path,
    content: str | bytes,
    like: Path,
) -> None:
    """Write a file that is not there yet, with the permissions of the one `like` it."""
    if isinstance(content, str):
        content = content.encode("utf-8")
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # a full disk may say so only here
    with contextlib.suppress(FileNotFoundError):
        path.chmod(stat.S_IMODE(like.stat().st_mode))


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn an OSError, or text that UTF-8 does not have, into a FileError that names `path`."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise FileError(
            f"{path.name} could not be written ({why}); it is as it was before."
        ) from error
