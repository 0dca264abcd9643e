"""What readers send: files without a private word, and a script that says of each whether it can be
believed.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import card_faults
import pytest
import verify_record
from settings import ROOT
from tiny_models import config
from vramlab import (
    LoRA,
    MiB,
    Quantization,
    Recipe,
    RecordError,
    find_gpu,
    share,
    simulate,
    simulate_generation,
)
from vramlab.interfaces.measure_and_record import simulated_beside
from vramlab.measurement import share as sharing
from vramlab.measurement.records import VERSIONS, add, load, save
from vramlab.measurement.share import CARD
from vramlab.report.report import Speed, TensorGroup, environment

RECIPE = Recipe("gpt2", batch_size=2, seq_len=128, num_layers=2)
T4 = {
    "gpu": "Tesla T4",
    "compute_capability": "7.5",
    "multiprocessors": 40,
    "total_memory": 14912 * MiB,
}
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
    """A submission as a card would have made it, from simulate's own figures with `changes`, as
    share writes it.
    """

    def make(
        recipe: Recipe = RECIPE, card: dict = T4, versions: dict | None = None, **changes
    ) -> Path:
        reserved = int(simulated.reserved.value) // (2 * MiB) * 2 * MiB
        told = {
            **environment(),
            **card,
            "cuda": "13.0",
            "driver": "580.1",
            "hostname": "box",
            **(versions or {}),
        }
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
    with pytest.raises(
        RecordError, match=r"can be shared: .*its model is not of the catalogue, so nobody else"
    ):
        made_up(recipe=own)
    with pytest.raises(RecordError, match="it was measured on a CPU"):
        made_up(target="cpu", card={"gpu": None})
    with pytest.raises(RecordError, match="can be shared: there is no record of a GPU in it"):
        share(tmp_path / "nothing")


def test_what_others_measured_is_not_offered_as_ones_own(monkeypatch, tmp_path):
    """A fresh install has the project's own records; sharing them as "your machine" was the
    default.
    """
    assert any(
        sharing.SENT.search(path.name) for path in sharing.measurements_folder().glob("*.json")
    )
    with pytest.raises(
        RecordError, match=r"this machine has measured nothing there.*`vramlab share my_records`"
    ):
        share(None, tmp_path)


def test_all_that_is_sent_is_shown(made_up, tmp_path, monkeypatch):
    path = made_up()
    shown = str(share(tmp_path / "records", tmp_path)[0])
    for said in (path.name, str(RECIPE), "gpu Tesla T4", "driver 580.1", "nothing has been sent"):
        assert said in shown
    assert "a pull request that adds it to data/measurements/" in shown, (
        "the project has no address yet"
    )
    monkeypatch.setattr(sharing, "repository", lambda: "https://github.com/somebody/vramlab")
    page = share(tmp_path / "records", tmp_path)[0].page
    assert page == "https://github.com/somebody/vramlab/upload/main/data/measurements"


def test_a_good_one_is_accepted(made_up):
    verdict = verify_record.verify(made_up())
    assert verdict.outcome == "accepted" and verdict.reasons == []
    assert [row[1] for row in verdict.rows] == [row[2] for row in verdict.rows]


def test_one_that_is_wrong_by_three_per_cent_is_a_finding_with_its_tensors(
    made_up, simulated, capsys
):
    more = -(-int(0.03 * simulated.allocated) // 512) * 512
    peak = dataclasses.replace(simulated.peak, unexplained=more)
    largest = [dataclasses.replace(simulated.largest[0], op="aten::sort"), *simulated.largest[1:]]
    path = made_up(peak=peak, allocated=simulated.allocated + more, largest=largest)
    assert verify_record.main([str(path)]) == 1
    said = capsys.readouterr().out
    assert "simulate is off by -2.9" in said and "aten::sort" in said and "**finding**" in said


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"driver": "580.1"', '"driver": "580.2"'),
        ('"reports"', '"reports":{}, "report"'),
        ("}", ""),
    ],
)
def test_one_edited_by_hand_is_refused(made_up, old, new, capsys):
    path = made_up()
    path.write_text(path.read_text().replace(old, new, 1))
    assert verify_record.main([str(path)]) == 2
    said = capsys.readouterr().out
    assert any(why in said for why in ("it was changed after", "cannot be read", "holds no report"))


def test_one_of_other_versions_says_which_and_is_no_finding_before_they_were_tried(
    made_up, simulated
):
    other = {"transformers": "5.16.0"}
    verdict = verify_record.verify(made_up(versions=other))
    assert verdict.outcome == "accepted" and "transformers 5.16.0" in verdict.reasons[-1]
    more = simulated.allocated // 20 // 512 * 512
    peak = dataclasses.replace(simulated.peak, unexplained=more)
    verdict = verify_record.verify(
        made_up(versions=other, peak=peak, allocated=simulated.allocated + more)
    )
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
        (
            {"process": 14912 * MiB},
            "it holds 15,636,365,312 of 15,636,365,312 bytes, of which the driver keeps some",
        ),
        (
            {"process": 15000 * MiB, "reserved": 15000 * MiB},
            "bytes, of which the driver keeps some",
        ),
        ({"process": 512}, "is more than process 512"),
        (
            {"largest": [TensorGroup(2**34, "activations", (2**32,), "float32", "aten::mm")]},
            "the largest tensors: 17,179",
        ),
        ({"peak_phase": "load", "phases": {}}, "its peak is in 'load', of which it says nothing"),
        ({"speed": Speed(0.05, 0.04, 0.06, 0, 256 / 0.05)}, "it was timed 0 times"),
        ({"speed": Speed(0.05, 0.04, 0.06, 1, 256 / 0.05)}, "are not the times of 1 steps"),
        ({"speed": Speed(0.05, 0.04, 0.09, 2, 256 / 0.05)}, "are not the times of 2 steps"),
        ({"title": "gpt2 · twice as good"}, "and its recipe's is"),
        ({"title": "<h1>gpt2"}, "and its recipe's is"),
        (
            {"notes": ["<script>alert(1)</script>"]},
            "has a character that no note or message of ours has",
        ),
        ({"notes": ["[x](y) `code`"]}, "has a character that no note"),
        ({"notes": ["thanks to @torvalds"]}, "has a character that no note"),
        ({"notes": ["two\nlines"]}, "has a character that no note"),
        (
            {"largest": [TensorGroup(512, "activations", (2,), "float32", "<b>")]},
            "has a character that no note",
        ),
        (
            {"versions": {"driver": None, "cuda": None, "torch": None}},
            "the environment says nothing of torch",
        ),
        ({"requested": None}, "the allocator's peaks are missing"),
        ({"allocated": 12800}, "the categories add up to"),
        ({"speed": Speed(1e-7, 1e-7, 1e-7, 3, 256 / 1e-7)}, "TFLOP/s are more than T4 can do"),
        ({"speed": Speed(0.05, 0.06, 0.06, 3, 256 / 0.05)}, "its seconds a step are"),
        ({"speed": Speed(0.05, 0.04, 0.06, 3, 9.0)}, "9 tokens/s are not 256 tokens in 0.05 s"),
        ({"speed": None}, "it has no time"),
        ({"speed": None, "notes": ["alone on the card"]}, "it has no time"),
        (
            {"card": {**T4, "total_memory": 40000 * MiB}},
            "T4 has 14.562 GiB, and it says 39.062 GiB",
        ),
    ],
)
def test_what_no_gpu_can_have_measured_is_refused(made_up, changes, why):
    verdict = verify_record.verify(made_up(**changes))
    assert verdict.outcome == "refused" and why in str(verdict)


REFUSED_BY_FORM = [
    (("environment", "date"), "9999-99-99", "its date is"),
    (("environment", "date"), "9998-12-31", "its date is"),
    (("environment", "gpu"), "Tesla T4<script>", "which is none"),
    (("notes",), ["x" * 30_000_000], "a text of 30,000,000 characters"),
    (("notes",), ["\x1b]0;owned\x07"], "the control character"),
    (("speed", "median"), 1e999, "no number"),
    (("colour",), 5, "is unknown"),
    (("environment", "home"), "x", "which no submission has"),
]


@pytest.mark.parametrize(
    ("path", "value", "why"), REFUSED_BY_FORM, ids=lambda value: str(value)[:20]
)
def test_a_forged_form_is_refused_and_named_by_its_content_all_the_same(made_up, path, value, why):
    """As somebody writes it who knows how `share` names files."""
    file = made_up()
    content = json.loads(file.read_text())
    (entry,) = content["reports"].values()
    place = entry
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    text = json.dumps(content, indent=1) + "\n"
    forged = file.with_name(sharing.content_name(entry["environment"], text))
    forged.write_text(text)
    verdict = verify_record.verify(forged)
    assert verdict.outcome == "refused" and why in " ".join(verdict.reasons), verdict.reasons


def test_nothing_of_a_file_is_markup_where_it_is_shown():
    verdict = verify_record.Verdict(
        "<b>.json", "refused", ["<script>alert(1)</script> @all [x](y)\n# z\x1b[2J"]
    )
    verdict.rows = [("a | <b>", 1, 1)]
    shown = str(verdict)
    assert (
        r"\<script\>alert(1)\</script\> &#64;all \[x\](y) \# z\\x1b\[2J" in shown
        and r"a \| \<b\>" in shown
    )
    assert not {"\x1b", "@"} & set(shown) and "\n#" not in shown
    verdict.reasons = [
        "see https://evil.example or www.evil.example: now"
    ]  # which GitHub links by itself
    assert "see https&#58;//evil.example or www&#46;evil.example: now" in str(verdict)


def test_a_step_is_as_fast_as_others_on_such_a_card(made_up):
    """A time forged by 2.9, with all that follows from it: no honest step was ever so fast, or it
    was recorded before.
    """
    (path,) = ROOT.glob("data/measurements/nvidia-h100*.json")
    timed = [r for r in load(path).values() if r.speed and not r.recipe["torch_compile"]]
    assert [r.title for r in timed if verify_record._beside_times(r, path)] == []
    forged = [dataclasses.replace(r, speed=faster(r.speed, 2.9)) for r in timed[::9]]
    caught = sum(bool(verify_record._beside_times(r, path)) for r in forged)
    assert caught > 0.8 * len(forged) > 16
    assert all(
        "times as long as in nvidia-h100" in verify_record._beside_times(r, Path("other.json"))
        for r in forged
    )
    usual = sum(verify_record.estimate(RECIPE, find_gpu("T4")).values())
    verdict = verify_record.verify(
        made_up(speed=faster(Speed(usual, usual, usual, 3, RECIPE.tokens / usual), 2.9))
    )
    assert verdict.outcome == "finding" and "times the estimate" in verdict.reasons[-1]


def faster(speed: Speed, times: float) -> Speed:
    seconds = (value / times for value in (speed.median, speed.low, speed.high))
    return Speed(*seconds, speed.repeats, speed.tokens_per_second * times)


def test_out_of_memory_is_believed_where_simulate_says_it_is_near(made_up):
    large = RECIPE.replace(batch_size=64, seq_len=1024, num_layers=None)
    none = {
        "status": "oom",
        "message": "CUDA out of memory",
        "speed": None,
        "reserved": None,
        "process": None,
    }
    assert verify_record.verify(made_up(recipe=large, **none)).outcome == "accepted"
    verdict = verify_record.verify(made_up(**none))
    assert (
        verdict.outcome == "finding"
        and "it ran out of memory, and simulate says at most" in verdict.reasons[0]
    )


def test_record_prints_what_simulate_says_beside(made_up, simulated):
    report = dataclasses.replace(simulated, environment={**environment(), **T4})
    assert simulated_beside(report).endswith("(+0.00%)")
    assert find_gpu("T4").total == T4["total_memory"]


# --- facts

BASE_4_BITS = Recipe(
    "gpt2",
    seq_len=128,
    num_layers=2,
    lora=LoRA(r=8),
    quantization=Quantization("nf4", prepare=False),
)


@pytest.fixture(scope="module")
def four_bits():
    return simulate(BASE_4_BITS, gpu="T4")


def judged(folder: Path, *facts) -> verify_record.Verdict:
    """The verdict on a file of these facts, as share writes it."""
    path = folder / "facts.json"
    path.unlink(missing_ok=True)
    for fact in facts:
        add(fact, path)
    return verify_record.verify(share(path, folder)[0].file)


def test_facts_are_accepted_with_what_simulate_says_beside(tmp_path, simulated, four_bits):
    peak = four_bits.loading.total // 512 * 512
    answering = simulate_generation("gpt2", 512, 64, gpu="T4")
    one = Recipe(**answering.recipe)
    facts = [
        card_faults.context("cuBLAS"),
        card_faults.steps(RECIPE, simulated.allocated),
        card_faults.out_of_memory(RECIPE.replace(seq_len=1024), 64),
        card_faults.loading(BASE_4_BITS, peak),
        card_faults.generation(one, answering.allocated),
    ]
    found = judged(tmp_path, *facts)
    assert (found.outcome, found.reasons) == ("accepted", [])
    titles = {title.split(" · ")[0]: simulated_bytes for title, _, simulated_bytes in found.rows}
    assert titles == {
        "steps": simulated.allocated,
        "loading": four_bits.loading.total,
        "generation": answering.allocated,
    }


def test_a_fact_that_simulate_does_not_expect_is_a_finding(tmp_path, simulated, four_bits):
    large = int(1.03 * simulated.allocated) // 512 * 512
    found = judged(tmp_path, card_faults.steps(RECIPE, large))
    assert found.outcome == "finding" and "simulate is off by -2.9" in found.reasons[0]
    found = judged(tmp_path, card_faults.out_of_memory(RECIPE, 4))
    assert (
        found.outcome == "finding"
        and "it ran out of memory, and simulate says at most" in found.reasons[0]
    )
    found = judged(
        tmp_path, card_faults.loading(BASE_4_BITS, four_bits.loading.total // 512 * 512 + 64 * MiB)
    )
    assert found.outcome == "finding"


@pytest.mark.parametrize(
    ("make", "changes", "why"),
    [
        (
            "context",
            {"used_after": 5 * 2**30},
            "bytes outside the allocator are no context of CUDA",
        ),
        ("context", {"used_after": None}, "neither NVML's process nor its memory in use is there"),
        ("context", {"reserved": 3 * MiB + 512}, "its allocator hands out no such blocks"),
        ("context", {"allocated": 4 * MiB}, "≤ 2,097,152 ≤ 15,636,365,312 does not hold"),
        ("context", {"smi_used": 2**40}, "smi_used 1,099,511,627,776 is more than the card's"),
        ("steps", {"seconds": [0.05] * 9}, "9 times are not those of 10 steps"),
        ("steps", {"seconds": [1e-6] * 10}, "is faster than T4 computes"),
        ("steps", {"power": [90.0]}, "90 W are more than its limit of 70 W"),
        ("steps", {"requested": 2**34}, "does not hold"),
        ("steps", {"throttle": ["<img>"]}, "has a character that no note or message of ours has"),
        ("loading", {"kept": 2**34}, "it kept more than its peak"),
        ("generation", {"prefill": 512}, "its peak is in neither part"),
        ("out_of_memory", {"message": "CUDA out of memory. Sorry."}, "PyTorch says nothing like"),
        ("out_of_memory", {"total": 2**34}, "of a card with 15,636,365,312 bytes"),
        ("out_of_memory", {"peak_allocated": 0}, "its peaks are not between"),
    ],
)
def test_a_fact_that_no_card_can_have_shown_is_refused(tmp_path, make, changes, why):
    made = {
        "context": lambda: card_faults.context("bare", **changes),
        "steps": lambda: card_faults.steps(RECIPE, 2**30, **changes),
        "loading": lambda: card_faults.loading(BASE_4_BITS, 2**30, **changes),
        "out_of_memory": lambda: card_faults.out_of_memory(RECIPE, 64, **changes),
        "generation": lambda: card_faults.generation(RECIPE, 2**30, **changes),
    }
    found = judged(tmp_path, made[make]())
    assert found.outcome == "refused" and why in " ".join(found.reasons)


def test_facts_of_another_card_or_edited_by_hand_are_refused(tmp_path):
    other = card_faults.context("cuBLAS")
    other.environment["multiprocessors"] = 41
    found = judged(tmp_path, card_faults.context("bare"), other)
    assert found.outcome == "refused" and "one file holds records of one card" in found.reasons[0]
    path = tmp_path / "facts.json"
    path.unlink()
    add(card_faults.context("bare"), path)
    sent = share(path, tmp_path)[0].file
    sent.write_text(sent.read_text().replace('"allocated": 512', '"allocated": 1024'))
    found = verify_record.verify(sent)
    assert found.outcome == "refused" and "its name is not that of its content" in found.reasons[0]


def test_only_the_one_new_file_is_taken_from_a_pull_request(made_up, tmp_path):
    """Of somebody's branch nothing else is read: a second file, another place or an existing name
    is answered with no.
    """
    clone, path = (
        tmp_path / "clone",
        made_up(RECIPE.replace(torch_compile=True)),
    )  # of which nothing is simulated
    (clone / "data/measurements").mkdir(parents=True)
    (clone / "tests").symlink_to(ROOT / "tests")
    name = f"data/measurements/{path.name}"
    path.rename(clone / name)
    git = [
        "git",
        "-C",
        str(clone),
        "-c",
        "user.name=somebody",
        "-c",
        "user.email=somebody@example.com",
    ]
    for command in (
        ["init", "-q"],
        ["add", "data"],
        ["commit", "-qm", "Add a record"],
        ["rm", "-q", name],
    ):
        subprocess.run([*git, *command], check=True)

    def taken(changes: str, commit: str = "HEAD") -> subprocess.CompletedProcess:
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        command = ["bash", "tests/tools/take_record.sh", changes, commit]
        return subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)

    (clone / "data/measurements").mkdir(parents=True)
    (clone / "data/measurements/link.json").symlink_to("/etc/passwd")
    subprocess.run([*git, "add", "data/measurements/link.json"], check=True)
    subprocess.run([*git, "commit", "-qm", "Add a link"], check=True)
    (clone / "data/measurements/link.json").unlink()
    added = f"added\t{name}"
    for changes in (
        f"{added}\nmodified\thelpers/vramlab/__init__.py",
        f"modified\t{name}",
        "added\thelpers/a.json",
        "added\tdata/measurements/../../a.json",
        "added\tdata/measurements/$(id).json",
        "added\tdata/measurements/<script>.json",
        "added\tdata/measurements/none.json",
        "added\tdata/measurements/link.json",
        "",
    ):
        answer = taken(changes)
        assert (
            answer.returncode == 2
            and answer.stdout.startswith("**refused**")
            and "<" not in answer.stdout
        )
        assert [*(clone / "data/measurements").iterdir()] == []
    before = subprocess.run(
        [*git, "rev-parse", "HEAD~1"], check=True, capture_output=True, text=True
    ).stdout.strip()
    accepted = taken(added, before)
    assert (
        accepted.returncode == 0 and "**accepted**" in accepted.stdout and (clone / name).exists()
    ), accepted.stderr
    assert taken(added, before).stdout.endswith("is there already.\n")


def test_the_workflow_holds_no_right_that_a_stranger_could_use():
    """It judges one commit, executes nothing of it, and merges nothing: a person does."""
    import yaml

    text = (ROOT / ".github/workflows/records.yml").read_text(encoding="utf-8")
    flow = yaml.safe_load(text)
    assert flow["permissions"] == {} and "contents: write" not in text and "FETCH_HEAD" not in text
    rights = {name: job["permissions"] for name, job in flow["jobs"].items()}
    assert (
        rights["judge"] == {"contents": "read"}
        and "contents" not in rights["answer"] | rights["withdraw"]
    )
    steps = [(name, step) for name, job in flow["jobs"].items() for step in job["steps"]]
    commands = "\n".join(step["run"] for _, step in steps if "run" in step)
    assert "${{" not in commands, "no text of an event stands in a shell's line"
    assert not [line for line in commands.splitlines() if "merge" in line and "printf" not in line]
    assert (
        '"$COMMIT"' in commands
        and flow["env"]["COMMIT"] == "${{ github.event.pull_request.head.sha }}"
    )
    assert "--match-head-commit" in commands and "Judged commit: %s" in commands
    checkouts = [(name, step["with"]) for name, step in steps if "checkout" in step.get("uses", "")]
    assert checkouts == [
        (
            "judge",
            {"ref": "${{ github.event.pull_request.base.sha }}", "persist-credentials": False},
        )
    ], "only the base's own files are run, and the token is not left for them"


def test_text_of_others_means_itself_in_a_report():
    shown = verify_record.markdown("# <b>@all</b> &lt; [x](y) `a|b`\n\x1b")
    assert shown == r"\# \<b\>&#64;all\</b\> &amp;lt; \[x\](y) \`a\|b\` \\x1b"
