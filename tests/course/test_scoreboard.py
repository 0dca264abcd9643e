"""Who was fitted to which published runs, and what the page on accuracy says of others."""

import hashlib
import importlib.util
import io
import json
import re
import tarfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def fitted_runs():
    """`benchmarks/fitted_runs.py` as a module."""
    spec = importlib.util.spec_from_file_location(
        "fitted_runs", ROOT / "benchmarks" / "fitted_runs.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def archives(
    folder: Path, facts: dict, roles: dict[str, str] | None = None, quoted: bool = True
) -> None:
    """Write what the two source distributions hold of who was fitted to what, after `facts`;
    `roles` renames roles.
    """
    own = [run for run in facts["runs"] if run["source"] == "fitcheck-llm"]
    rows = [{"measured": {"peak_allocated_mib": run["allocated"] / 2**20}} for run in own]
    manifest = []
    for index, run in enumerate(own):
        role = (roles or {}).get(run["role"], run["role"])
        manifest.append({"file": "t4.json", "index": index, "role": role})
    members = {
        "data/measurements/manifest.json": json.dumps({"rows": manifest}),
        "data/measurements/t4.json": json.dumps({"runs": rows}),
    }
    for tool in ("fitcheck-llm", "vramcalc"):
        source = facts["sources"][tool]
        for fit in source["fitted"]:
            members[fit["file"]] = fit["says"] if quoted else "something else"
        stem = source["package"].partition(" (")[0].replace("-", "_").replace(" ", "-")
        path = folder / f"{stem}.tar.gz"
        with tarfile.open(path, "w:gz") as files:
            for name, text in members.items():
                info = tarfile.TarInfo(f"{stem}/{name}")
                info.size = len(text.encode())
                files.addfile(info, io.BytesIO(text.encode()))
        source["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()


def test_archives_that_say_the_same_are_no_difference(fitted_runs, tmp_path):
    facts = fitted_runs.stored()
    archives(tmp_path, facts)
    assert fitted_runs.differences(tmp_path, facts) == []


@pytest.mark.parametrize(
    ("change", "number", "said"),
    [
        ({"roles": {"holdout": "calibration"}}, 12, "is holdout here and ['calibration'] there"),
        ({"quoted": False}, 3, "does not say"),
    ],
)
def test_archives_that_say_something_else_are(fitted_runs, tmp_path, change, number, said):
    facts = fitted_runs.stored()
    archives(tmp_path, facts, **change)
    found = fitted_runs.differences(tmp_path, facts)
    assert len(found) == number and all(said in sentence for sentence in found)


def test_another_archive_is_a_difference(fitted_runs, tmp_path):
    facts = fitted_runs.stored()
    archives(tmp_path, facts)
    facts["sources"]["vramcalc"]["sha256"] = "0" * 64
    assert fitted_runs.differences(tmp_path, facts) == [
        "vramcalc-0.1.2.tar.gz is another archive than the one that was read"
    ]


def plain(facts: dict, seen: list[bool], tool: str) -> tuple[int, int]:
    """The tool's own plain runs, and those of them that set none of its constants."""
    own = [
        fitted
        for run, fitted in zip(facts["runs"], seen, strict=True)
        if run["source"] == tool and not run.get("as_run")
    ]
    return len(own), own.count(False)


def test_the_page_says_who_was_fitted_to_what(fitted_runs):
    facts = fitted_runs.stored()
    roles = Counter(run.get("role") for run in facts["runs"] if run["source"] == "fitcheck-llm")
    assert roles == {"calibration": 49, "holdout": 12, "excluded": 10}
    fitcheck, vramcalc = (
        fitted_runs.set_constants_of(tool, facts) for tool in ("fitcheck-llm", "vramcalc")
    )
    assert (sum(fitcheck), sum(vramcalc)) == (32, 13)
    assert not any(fitted_runs.set_constants_of("vramlab predict", facts))
    assert plain(facts, fitcheck, "fitcheck-llm") == (41, 23) and plain(
        facts, vramcalc, "vramcalc"
    ) == (1, 0)

    page = (ROOT / "site/accuracy.md").read_text(encoding="utf-8")
    text = " ".join(page.split())
    assert (
        "vramcalc's 13 runs set two of its constants, and 32 of fitcheck-llm's 71 its counts of "
        "activations" in text
    )
    assert "The 49 that it fitted its allowance" in text
    cells = {}
    for line in page.splitlines():
        if line.startswith(("| vramcalc", "| fitcheck-llm", "| `vramlab.predict`")):
            row = [cell.strip() for cell in line.strip("|").split("|")]
            cells[re.sub(r"[`| ].*", "", row[0].lstrip("`"))] = (
                int(row[1]),
                int(row[3]),
                int(row[5]),
            )
    others = {
        "vramcalc": 13,
        "fitcheck-llm": 11,
    }  # plain runs of other projects that it answers for
    for tool, seen in (("vramcalc", vramcalc), ("fitcheck-llm", fitcheck)):
        own, unseen = plain(facts, seen, tool)
        assert cells[tool][1:] == (own + others[tool], unseen + others[tool])
    assert cells["vramlab.predict"][1:] == (53, 53)


def test_states_alone_are_asked_in_the_precision_that_ran(fitted_runs):
    """accelerate's 16-bit figures and all of DeepSpeed's are of mixed precision: two of the seven
    full runs.
    """
    full = [
        run["recipe"]["precision"]
        for run in fitted_runs.stored()["runs"]
        if not run["recipe"].get("lora")
    ]
    assert Counter(full) == {"bf16-true": 5, "bf16-mixed": 2}
    rows = (ROOT / "site/accuracy.md").read_text(encoding="utf-8").splitlines()
    asked = [line.split("|")[2].strip() for line in rows if "states only" in line]
    assert asked == ["2", "2"]
