"""Files of others are read with care, ours are written whole or not at all, and text of others is
shown as text.
"""

import os
import stat

import pytest
from vramlab.base.errors import FileError, RecipeError
from vramlab.base.files import (
    is_ours,
    read_bytes,
    read_text,
    strict_json,
    write_atomically,
    write_files,
)
from vramlab.base.text import printable

POSIX = pytest.mark.skipif(
    os.name == "nt", reason="Windows has no FIFO, and no limit of a file's size"
)


@POSIX
def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path, why in (
        (tmp_path / "fifo", "a pipe"),
        ("/dev/zero", "a device"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(FileError, match=why):
            read_bytes(path)
    (tmp_path / "link").symlink_to("/dev/zero")
    with pytest.raises(FileError, match="no regular file"):
        read_text(tmp_path / "link")


def test_a_large_file_is_refused_before_it_is_read(tmp_path):
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(2**40)  # of holes
    with pytest.raises(FileError, match="larger than 64 MiB"):
        read_bytes(tmp_path / "huge")
    (tmp_path / "small").write_bytes(b"x" * (2**20 + 1))
    assert len(read_bytes(tmp_path / "small")) == 2**20 + 1
    with pytest.raises(FileError, match="larger than 1 MiB"):
        read_bytes(tmp_path / "small", 2**20)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_text_may_have_a_mark_and_windows_ends_of_lines(tmp_path, encoding):
    (tmp_path / "x").write_bytes("4 × 8\r\nno".encode(encoding))
    assert read_text(tmp_path / "x") == "4 × 8\nno"


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "x").write_bytes(b"ab\xffc")
    with pytest.raises(FileError, match=r"x is no text in UTF-8 \(invalid start byte at byte 2\)"):
        read_text(tmp_path / "x")
    assert read_text(tmp_path / "x", errors="replace") == "ab\ufffdc"


@pytest.mark.parametrize(
    "text",
    ["NaN", "[-Infinity]", "1e999", '{"a": 1, "a": 1}', "[" * 100_000, "1" * 5000, "", "\x00"],
)
def test_json_is_strict(text):
    with pytest.raises(ValueError) as caught:
        strict_json(text)
    assert "\n" not in str(caught.value)


def test_what_was_written_is_there_with_its_link_and_permissions(tmp_path):
    target, link, new = tmp_path / "target", tmp_path / "link", tmp_path / "new"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to("target")
    write_files({link: "4 × 8", new: b"\x00"})
    assert (
        link.is_symlink() and target.read_text("utf-8") == "4 × 8" and new.read_bytes() == b"\x00"
    )
    assert stat.S_IMODE(target.stat().st_mode) == 0o640 or os.name == "nt"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "new", "target"]


@POSIX
def test_a_disk_that_fills_up_leaves_every_file_as_it_was(tmp_path):
    """A real error of the kernel in the middle of the second file."""
    resource = pytest.importorskip("resource")
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(
            FileError,
            match=r"^second could not be written \(File too large\); it is as it was before",
        ):
            write_files({first: "new", second: "x" * 100_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["first"] and first.read_text() == "old"


@POSIX
def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path, why in (
        (tmp_path / "fifo", "no regular file"),
        (tmp_path / "none" / "x", "No such file"),
    ):
        with pytest.raises(FileError, match=why):
            write_atomically(path, "new")
    with pytest.raises(FileError, match="surrogates not allowed"):
        write_atomically(tmp_path / "x", "\ud800")
    assert [path.name for path in tmp_path.iterdir()] == ["fifo"]


def test_ours_are_told_from_others(tmp_path):
    heads = {
        "program": b'"""Train.\n\nWritten by vramlab 1',
        "report": b'{\n  "source": "measured"',
        "dump": b"\x80\x04",
    }
    for name, head in (heads | {"other": b"import os\n", "empty": b""}).items():
        (tmp_path / name).write_bytes(head)
    assert [is_ours(tmp_path / name) for name in (*heads, "other", "empty", "none")] == [
        True
    ] * 3 + [False] * 3


def test_text_of_others_is_shown_as_text():
    assert (
        printable("a\x1b[31m\x07\x9b b\n\t\u202e\ud800×")
        == "a\\x1b[31m\\x07\\x9b b\n\t\\u202e\\ud800×"
    )
    assert str(RecipeError("x", 1, "it is \x1b[2J")).endswith("but it is \\x1b[2J.")
