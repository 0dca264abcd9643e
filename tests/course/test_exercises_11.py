"""Chapter 11's exercises: right answers in other words are accepted, and what readers get wrong is
told apart.
"""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from vramlab_course import exercises
from vramlab_course.chapters import chapter_11
from vramlab_course.exercises import judge
from vramlab_course.judges import judges_11

FOUND = exercises.chapter("11")


def test_there_are_three_with_two_hints_each():
    assert list(FOUND) == ["11.1", "11.2", "11.3"]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())


def every(ddp, parts):
    for part in parts:
        ddp(part).mean().backward()


def once(ddp, parts):
    with ddp.no_sync():
        every(ddp, parts[:-1])
    every(ddp, parts[-1:])


def around_backward_only(ddp, parts):
    for part in parts:
        loss = ddp(part).mean()
        with ddp.no_sync():
            loss.backward()


def never(ddp, parts):
    with ddp.no_sync():
        every(ddp, parts)


def the_last_one_only(ddp, parts):
    every(ddp, parts[-1:])


class Raw(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return chapter_11.pixels(index)


class Divided(Raw):
    def __getitem__(self, index):
        return chapter_11.pixels(index) / 255


def loader(pictures, workers=2):
    ahead = 2 if workers else None
    return DataLoader(pictures, batch_size=8, num_workers=workers, prefetch_factor=ahead)


def divided_on_arrival():
    for batch in loader(Raw()):
        yield batch.float().div_(255)


@pytest.mark.parametrize(("name", "answer"), [("11.1", once), ("11.3", divided_on_arrival)])
def test_a_repair_is_accepted(name, answer):
    verdict = judge(FOUND[name], answer)
    assert verdict.right, verdict.text


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("11.1", every, "exchanges 4 times"),
        ("11.1", around_backward_only, "exchanges 4 times"),
        ("11.1", never, "exchanges 0 times"),
        ("11.1", the_last_one_only, "not those of all 4"),
        ("11.3", lambda: loader(Divided()), "64 MiB"),
        ("11.3", lambda: loader(Raw()), "what arrives has changed"),
        ("11.3", lambda: loader(Raw(), workers=0), "keep its two workers"),
    ],
)
def test_what_readers_get_wrong_is_told_apart(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right and said in verdict.text, verdict.text


def test_where_no_mounts_are_allowed_a_loader_is_measured(monkeypatch):
    def refused(mib, work):
        raise judges_11.RankFailed(f"OSError: {judges_11.NO_MOUNTS}")

    monkeypatch.setattr(judges_11, "with_shared", refused)
    monkeypatch.setattr(chapter_11, "SETTLED", 0.3)
    for pictures, said in ((Divided(), "fills 120 MiB"), (Raw(), "has changed")):
        assert said in judge(FOUND["11.3"], lambda pictures=pictures: loader(pictures)).text


def test_a_log_is_read_bit_by_bit():
    def held(lines):
        codes = [int(line.rsplit(",", 1)[1], base=16) for line in lines]
        at_work = [code for code in codes if code != 1]
        return torch.tensor([bool(code & 0x20 or code & 0x40) for code in at_work]).float().mean()

    assert judge(FOUND["11.2"], held).right
