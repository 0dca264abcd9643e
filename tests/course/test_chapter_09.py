"""What chapter 09 prints for a reader to start: here it runs on two CPU ranks."""

import os
import re
import subprocess
import sys

import nbformat
import pytest
from vramlab_course.base_model import base_model_folder

CHAPTER = "09_more_than_data_parallel.ipynb"
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def printed_script(root, word: str) -> str:
    """The chapter's Python block that has the word, for the course's base model."""
    cells = nbformat.read(root / "notebooks" / CHAPTER, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    (block,) = [each for each in re.findall(r"```python\n(.*?)```", text, re.S) if word in each]
    return re.sub(r'"Qwen/[^"]+"', repr(str(base_model_folder())), block)


def losses(script: str, path, ranks: list[str]) -> list[str]:
    """The losses that the first rank prints."""
    path.write_text(script)
    run = subprocess.run(
        [sys.executable, *ranks, str(path)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return re.findall(r"loss ([\d.]+)", run.stdout)


@pytest.mark.slow
def test_a_model_cut_by_transformers_trains_as_one_process_does(pytestconfig, tmp_path):
    script = printed_script(pytestconfig.rootpath, "tp_size")
    cut = losses(script, tmp_path / "cut.py", TWO_RANKS)
    whole = script.replace(", distributed_config=layout", "")
    assert whole != script
    alone = losses(whole, tmp_path / "whole.py", [])
    assert len(alone) == 5 and len(set(alone)) == 5  # it learns
    assert sorted(cut) == sorted(alone * 2)  # both ranks print, in any order
