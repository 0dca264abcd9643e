"""What chapter 11's cells share: the kernel's counter, what a loader fills, recorded sensors."""

import inspect
import shutil
import socket

import pytest
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from vramlab_course import published
from vramlab_course.chapters import chapter_11
from vramlab_course.chapters.chapter_04 import RankFailed


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
    monkeypatch.setattr(chapter_11, "RECEIVED", tmp_path / "none")
    monkeypatch.setattr(chapter_11, "SHARED", tmp_path / "none")
    assert chapter_11.loopback_bytes() is None
    assert chapter_11.shared_mib([]) is None


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda: range(8), "all 8 batches came"),
        (lambda: [bytes(1) for _ in open("/dev/shm/none")], "No such file"),  # noqa: SIM115
    ],
)
def test_how_a_loader_ends_in_a_container(work, said):
    ended = chapter_11.ending(work, 1)
    assert said in ended or ended.endswith(chapter_11.NO_MOUNTS)


def test_only_that_process_has_the_small_one():
    def size() -> int:
        return shutil.disk_usage("/dev/shm").total

    before = size()
    try:
        assert chapter_11.with_shared(1, size) == 2**20
    except RankFailed as error:
        assert str(error).endswith(chapter_11.NO_MOUNTS)
    assert size() == before


def test_recorded_sensors_are_of_one_card_by_watts():
    rows = chapter_11.recorded_sensors("H200")
    assert [row.model for row in rows] == ["gpt2", "llama-3.2-1b", "llama-3.1-8b"]
    assert all(0 < row.watts <= 700 for row in rows)
    assert chapter_11.recorded_sensors("T4") == []


def test_the_t4s_step_in_section_4_is_as_published():
    """For 1,024 tokens of Qwen2.5 7B in 4 bits, with fused attention."""
    (run,) = (
        run
        for run in published.runs()
        if run.gpu == "T4" and run.recipe.name == "qwen2.5-7b" and run.as_run == "repeated keys"
    )
    assert round(run.seconds, 3) == 3.725 and run.recipe.tokens == 1024
    assert run.recipe.lora and run.recipe.gradient_checkpointing


def test_fsdp_of_one_process_copies_in_the_computing_stream():
    """Section 3 adds fetching to computing. A PyTorch that overlaps the two ends that."""
    _, rest = inspect.getsource(FSDPParamGroup.unshard).split("if world_size == 1:")
    alone, several = rest.split("return\n", 1)
    assert "copy" not in alone and "get_all_gather_streams" in several
    _, rest = inspect.getsource(FSDPParamGroup.wait_for_unshard).split("if world_size == 1:")
    alone, _ = rest.split("else:", 1)
    assert "tensor.copy_(all_gather_input)" in alone and "stream" not in alone
