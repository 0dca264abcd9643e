"""What readers send: files without a private word, and a script that says of each whether it can be believed."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import verify_record
from settings import ROOT
from tiny_models import config
from vramlab import MiB, Recipe, RecordError, find_gpu, share, simulate
from vramlab.faces.measure import simulated_beside
from vramlab.measurement import share as sharing
from vramlab.measurement.records import save
from vramlab.measurement.share import CARD, VERSIONS
from vramlab.report.report import Speed, environment

RECIPE = Recipe("gpt2", batch_size=2, seq_len=128, num_layers=2)
T4 = {"gpu": "Tesla T4", "compute_capability": "7.5", "multiprocessors": 40, "total_memory": 14912 * MiB}
OWN = {
    "gpu": "NVIDIA GeForce RTX 6060 Ti",
    "compute_capability": "8.9",
    "multiprocessors": 46,
    "total_memory": 20000 * MiB,
}


@pytest.fixture(scope="module")
def simulated():
    return simulate(RECIPE, gpu="T4")


@pytest.fixture
def made_up(simulated, tmp_path):
    """A submission as a card would have made it, from simulate's own figures with `changes`, as share writes it."""

    def make(recipe: Recipe = RECIPE, card: dict = T4, versions: dict | None = None, **changes) -> Path:
        reserved = int(simulated.reserved.value) // (2 * MiB) * 2 * MiB
        told = {**environment(), **card, "cuda": "13.0", "driver": "580.1", "hostname": "box", **(versions or {})}
        values = {
            "source": "measured",
            "recipe": recipe.to_dict(),
            "title": str(recipe),
            "reserved": reserved,
            "process": reserved + 141 * MiB,
            "speed": Speed(0.05, 0.04, 0.06, 3, recipe.tokens / 0.05),
            "environment": told,
            "notes": [*simulated.notes, "read from /home/grace/models/gpt2 on a Monday"],
            **changes,
        }
        folder = tmp_path / "records"
        path = save(dataclasses.replace(simulated, **values), folder)
        return share(path, tmp_path)[0].file

    return make


def test_a_submission_tells_of_the_card_and_nothing_else(made_up):
    path = made_up()
    assert path.name.startswith("tesla-t4-torch") and len(path.stem.rsplit("-", 1)[1]) == 12
    (entry,) = json.loads(path.read_text())["reports"].values()
    assert set(entry["environment"]) == {*VERSIONS, *CARD, "date"}
    assert entry["notes"][-1] == "read from … on a Monday" and "grace" not in path.read_text()


def test_what_is_not_for_others_stays(made_up, tmp_path, simulated):
    (tmp_path / "config.json").write_text(json.dumps(config("gpt2")))
    own = dataclasses.replace(RECIPE, model=str(tmp_path / "config.json"), num_layers=None)
    with pytest.raises(RecordError, match=r"can be shared: .*its model is not of the catalogue, so nobody else"):
        made_up(recipe=own)
    with pytest.raises(RecordError, match="it was measured on a CPU"):
        made_up(target="cpu", card={"gpu": None})
    with pytest.raises(RecordError, match="can be shared: there is no record of a GPU in it"):
        share(tmp_path / "nothing")


def test_all_that_is_sent_is_shown(made_up, tmp_path, monkeypatch):
    path = made_up()
    shown = str(share(tmp_path / "records", tmp_path)[0])
    for said in (path.name, str(RECIPE), "gpu Tesla T4", "driver 580.1", "nothing has been sent"):
        assert said in shown
    assert "a pull request that adds it to data/measurements/" in shown, "the project has no address yet"
    monkeypatch.setattr(sharing, "repository", lambda: "https://github.com/somebody/vramlab")
    page = share(tmp_path / "records", tmp_path)[0].page
    assert page == "https://github.com/somebody/vramlab/upload/main/data/measurements"


def test_a_good_one_is_accepted(made_up):
    verdict = verify_record.verify(made_up())
    assert verdict.outcome == "accepted" and verdict.reasons == []
    assert [row[1] for row in verdict.rows] == [row[2] for row in verdict.rows]


def test_one_that_is_wrong_by_three_per_cent_is_a_finding_with_its_tensors(made_up, simulated, capsys):
    more = -(-int(0.03 * simulated.allocated) // 512) * 512
    peak = dataclasses.replace(simulated.peak, unexplained=more)
    largest = [dataclasses.replace(simulated.largest[0], op="aten::sort"), *simulated.largest[1:]]
    path = made_up(peak=peak, allocated=simulated.allocated + more, largest=largest)
    assert verify_record.main([str(path)]) == 1
    said = capsys.readouterr().out
    assert "simulate is off by -2.9" in said and "aten::sort" in said and "**finding**" in said


@pytest.mark.parametrize(
    ("old", "new"), [('"driver": "580.1"', '"driver": "580.2"'), ('"reports"', '"reports":{}, "report"'), ("}", "")]
)
def test_one_edited_by_hand_is_refused(made_up, old, new, capsys):
    path = made_up()
    path.write_text(path.read_text().replace(old, new, 1))
    assert verify_record.main([str(path)]) == 2
    said = capsys.readouterr().out
    assert any(why in said for why in ("it was changed after", "cannot be read", "holds no report"))


def test_one_of_other_versions_says_which_and_is_no_finding_before_they_were_tried(made_up, simulated):
    other = {"transformers": "5.16.0"}
    verdict = verify_record.verify(made_up(versions=other))
    assert verdict.outcome == "accepted" and "transformers 5.16.0" in verdict.reasons[-1]
    more = simulated.allocated // 20 // 512 * 512
    peak = dataclasses.replace(simulated.peak, unexplained=more)
    verdict = verify_record.verify(made_up(versions=other, peak=peak, allocated=simulated.allocated + more))
    assert verdict.outcome == "finding" and "transformers==5.16.0" in verdict.reasons[-1]
    assert verdict.reasons[-1].endswith("ask again before it counts as one")


def test_a_card_that_nobody_knows_is_taken(made_up):
    verdict = verify_record.verify(made_up(card=OWN))
    assert verdict.outcome == "accepted", verdict


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"reserved": 3 * MiB}, "reserved 3,145,728 is no multiple of 2,097,152"),
        ({"reserved": 2 * MiB}, "is more than reserved 2,097,152"),
        ({"process": 15000 * MiB, "reserved": 15000 * MiB}, "bytes"),
        ({"requested": None}, "the allocator's peaks are missing"),
        ({"allocated": 12800}, "the categories add up to"),
        ({"speed": Speed(1e-7, 1e-7, 1e-7, 3, 256 / 1e-7)}, "TFLOP/s are more than T4 can do"),
        ({"speed": Speed(0.05, 0.06, 0.06, 3, 256 / 0.05)}, "its seconds a step are"),
        ({"speed": Speed(0.05, 0.04, 0.06, 3, 9.0)}, "9 tokens/s are not 256 tokens in 0.05 s"),
        ({"speed": None}, "it has no time"),
        ({"card": {**T4, "total_memory": 40000 * MiB}}, "T4 has 14.562 GiB, and it says 39.062 GiB"),
    ],
)
def test_what_no_gpu_can_have_measured_is_refused(made_up, changes, why):
    verdict = verify_record.verify(made_up(**changes))
    assert verdict.outcome == "refused" and why in str(verdict)


def test_out_of_memory_is_believed_where_simulate_says_it_is_near(made_up):
    large = RECIPE.replace(batch_size=64, seq_len=1024, num_layers=None)
    none = {"status": "oom", "message": "CUDA out of memory", "speed": None, "reserved": None, "process": None}
    assert verify_record.verify(made_up(recipe=large, **none)).outcome == "accepted"
    verdict = verify_record.verify(made_up(**none))
    assert verdict.outcome == "finding" and "it ran out of memory, and simulate says at most" in verdict.reasons[0]


def test_record_prints_what_simulate_says_beside(made_up, simulated):
    report = dataclasses.replace(simulated, environment={**environment(), **T4})
    assert simulated_beside(report).endswith("(+0.00%)")
    assert find_gpu("T4").total == T4["total_memory"]


def test_only_the_one_new_file_is_taken_from_a_pull_request(made_up, tmp_path):
    """Of somebody's branch nothing else is read: a second file, another place or an existing name is answered with no."""
    clone, path = tmp_path / "clone", made_up(RECIPE.replace(torch_compile=True))  # of which nothing is simulated
    (clone / "data/measurements").mkdir(parents=True)
    (clone / "tests").symlink_to(ROOT / "tests")
    name = f"data/measurements/{path.name}"
    path.rename(clone / name)
    git = ["git", "-C", str(clone), "-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
    for command in (["init", "-q"], ["add", "data"], ["commit", "-qm", "Add a record"], ["rm", "-q", name]):
        subprocess.run([*git, *command], check=True)

    def taken(paths: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        command = ["bash", "tests/tools/take_record.sh", paths, "HEAD"]
        return subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)

    for paths in (f"{name}\nhelpers/vramlab/__init__.py", "helpers/a.json", "data/measurements/../../a.json"):
        assert taken(paths).returncode == 2 and not (clone / name).exists()
    accepted = taken(name)
    assert accepted.returncode == 0 and "**accepted**" in accepted.stdout and (clone / name).exists(), accepted.stderr
    assert taken(name).stdout.endswith("is there already.\n")
