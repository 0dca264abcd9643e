"""What became of plan's answers to random questions, trained on PyTorch's own allocator with rows
of one length and padded.

`python benchmarks/plan_tasks.py questions` made the file, on the stand-in for CUDA's libraries
(`data/stand_in/README.md`).
"""

import json

from settings import ROOT

ANSWERS = json.loads(
    (ROOT / "tests" / "stand_in" / "plan_questions.json").read_text(encoding="utf-8")
)


def test_all_sixty_questions_were_asked_and_each_answer_was_trained():
    """With rows of one length, and padded where its micro-batch has several samples."""
    assert len(ANSWERS) == 60
    answered = [entry for entry in ANSWERS if entry["runs"]]
    assert len(answered) == 54
    for entry in answered:
        padded = [run for run in entry["runs"] if "lengths" in run["recipe"]]
        has_many = entry["runs"][0]["recipe"]["batch_size"] > 1
        assert bool(padded) == has_many, entry
        assert all(run["allocated"] for run in entry["runs"])


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
