"""What chapter 11's cells share: the kernel's counter, what a loader fills, recorded sensors."""

import socket

import pytest
from vramlab_course.chapters import chapter_11


def test_the_kernel_counts_what_this_machine_sends_to_itself():
    before = chapter_11.loopback_bytes()
    if before is None:
        pytest.skip("no kernel counts here")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):
        sender.sendall(b"x" * 100_000)
        assert len(receiver.recv(100_000, socket.MSG_WAITALL)) == 100_000
    assert chapter_11.loopback_bytes() - before >= 100_000


def test_without_a_counter_or_shared_memory_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(chapter_11, "INTERFACES", tmp_path / "none")
    monkeypatch.setattr(chapter_11, "SHARED", tmp_path / "none")
    assert chapter_11.loopback_bytes() is None
    assert chapter_11.shared_mib(chapter_11.picture_loader()) is None


def test_a_batch_of_pictures_has_24_mib():
    loader = chapter_11.picture_loader()
    assert len(loader) == 8
    assert loader.batch_size * loader.dataset[0].nbytes == 24 * 2**20


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo unshare: not permitted >&2; exit 1", "not tried: this machine allows no mounts"),
        ("echo a trace; echo RuntimeError: no space >&2; exit 1", "RuntimeError: no space"),
    ],
)
def test_how_a_loader_ends_or_why_it_was_not_tried(script, said, tmp_path, monkeypatch):
    tool = tmp_path / "unshare"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert chapter_11.loader_in(64) == said
    monkeypatch.setenv("PATH", "")
    assert "no unshare" in chapter_11.loader_in(64)


def test_recorded_sensors_are_of_one_card_by_watts():
    rows = chapter_11.recorded_sensors("H200")
    assert [row[0] for row in rows] == ["gpt2", "llama-3.2-1b", "llama-3.1-8b"]
    assert all(0 < watts <= 700 for _, watts, *_ in rows)
    assert chapter_11.recorded_sensors("T4") == []
