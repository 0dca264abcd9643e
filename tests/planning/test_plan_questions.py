"""What became of plan's answers to random questions, trained on PyTorch's own allocator with rows
of one length, padded, joined and packed.

`python benchmarks/plan_tasks.py questions FILE 60 20261126` made the file, on the stand-in for
CUDA's libraries (`data/stand_in/README.md`).
"""

import json

from settings import ROOT
from vramlab import Recipe

ANSWERS = json.loads(
    (ROOT / "tests" / "stand_in" / "plan_questions.json").read_text(encoding="utf-8")
)


def is_joined(run):
    """Tell whether several samples are one row, which has no padding."""
    return Recipe(**run["recipe"]).joins


def test_all_sixty_questions_were_asked_and_each_answer_was_trained():
    """With rows of one length, and padded where its micro-batch has several samples, or joined."""
    assert len(ANSWERS) == 60
    answered = [entry for entry in ANSWERS if entry["runs"]]
    assert len(answered) == 50
    for entry in answered:
        assert all(run["allocated"] for run in entry["runs"])
        first = entry["runs"][0]
        padded = [run for run in entry["runs"] if "lengths" in run["recipe"]]
        has_many = first["recipe"]["batch_size"] > 1
        assert bool(padded) == has_many or is_joined(first), entry
    assert sum(is_joined(entry["runs"][0]) for entry in answered) == 22


def test_no_safe_answer_ran_out_of_memory():
    safe = [
        run
        for entry in ANSWERS
        if entry.get("tier") == "safe"
        for run in entry["runs"]
        if "allocated" in run
    ]
    assert len(safe) >= len(ANSWERS) // 2
    assert any("lengths" in run["recipe"] for run in safe)
    assert all(run["allocated"] for run in safe)


def test_no_recipe_of_the_space_is_faster_by_more_than_the_error():
    tried = [entry["faster"] for entry in ANSWERS if "faster" in entry]
    assert len(tried) == 10 and all(each["tried"] > 100 for each in tried)
    assert [each for each in tried if each["least"] < 1 / each["error"]] == []
