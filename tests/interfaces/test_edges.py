"""The command line at its edges: odd files, outputs that cannot be written, odd ways to start
Python. One sentence each.
"""

import os
import pickle
import subprocess
import sys

import pytest
from quick import params
from typer.testing import CliRunner
from vramlab.base.errors import FileError, RecipeError
from vramlab.interfaces import command_output
from vramlab.interfaces.cli import app
from vramlab.planning.plan import plan

POSIX = pytest.mark.skipif(
    os.name == "nt", reason="Windows has no FIFO, and no shell for these lines"
)


def run(*words, **more):
    return CliRunner().invoke(app, list(words), **more)


def refused(result, *said):
    """One sentence on stderr that has all that is `said`, and status 2."""
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert all(word in result.stderr for word in said), result.stderr
    assert result.stderr.count("\n") == 1 and not result.stderr.endswith("..\n")


# --- what is read

READERS = [
    "predict {}",
    "simulate {}",
    "plan {} --gpu T4",
    "diff {} gpt2",
    "explain {}",
    "predict gpt2 --lengths {}",
    "record {} --dry-run",
    "share {}",
    "explain {} --gpu T4",
]


@POSIX
@pytest.mark.parametrize("words", READERS)
@pytest.mark.parametrize("kind", ["fifo.json", "fifo.py", "fifo.pickle", "/dev/zero"])
def test_what_is_no_regular_file_is_not_read(words, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if not kind.startswith("/"):
        os.mkfifo(kind)
    if words == "share {}" and not kind.endswith(".json"):
        pytest.skip("share takes these for a folder without records")
    refused(run(*words.format(kind).split()), kind.rpartition("/")[2], "so it is not read")


FOREIGN = {
    "binary.json": b"\xff\xfe\x00",
    "latin.json": '{"model": "é"}'.encode("latin-1"),
    "text.json": b'"gpt2"',
    "number.json": b"5",
    "nan.json": b'{"phases": NaN, "model": "gpt2"}',
    "deep.json": b'{"a":' * 100_000,
    "huge.json": b'{"model": "gpt2", "batch_size": ' + b"9" * 5000 + b"}",
    "list.json": b"[1]",
    "deep.py": b"-" * 100_000 + b"1",
    "nested.py": b"(" * 100_000,
    "binary.py": b"\x00\xff",
    "deep.pickle": pickle.dumps({"device_traces": []}),
    "deep.jsonl": b"[" * 100_000,
}


LENGTHS = "predict gpt2 --lengths {}"  # a number or a list is a sample
PAIRS = [
    (w, name)
    for w in READERS
    for name in FOREIGN
    if (w, name[:4]) not in ((LENGTHS, "numb"), (LENGTHS, "list"))
]


@pytest.mark.parametrize(("words", "name"), PAIRS)
def test_a_foreign_file_is_one_sentence(words, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(FOREIGN[name])
    refused(run(*words.format(name).split()))


def test_a_report_with_an_unknown_field_names_it(tmp_path):
    (tmp_path / "r.json").write_text('{"phases": {}, "colour": 5}')
    refused(
        run("diff", str(tmp_path / "r.json"), "gpt2"),
        "Report field 'colour' is unknown: known there are source, ",
    )


def test_a_recipe_with_a_byte_order_mark_is_read(tmp_path):
    for encoding in ("utf-8-sig", "utf-16"):  # as Windows' editors and PowerShell write
        (tmp_path / "r.json").write_bytes('{"model": "gpt2", "num_layers": 1}'.encode(encoding))
        result = run("explain", str(tmp_path / "r.json"))
        assert result.exit_code == 0 and "gpt2 · batch 1" in result.stdout


def test_an_open_quote_is_one_sentence():
    refused(run("diff", "'gpt2", "gpt2"), "No closing quotation")


def test_text_that_is_longer_than_any_file_name_is_one_sentence():
    refused(run("explain", "x" * 5000))
    refused(run("diff", "x" * 5000, "gpt2"))


def test_a_terminals_orders_in_foreign_files_are_shown_as_text(tmp_path):
    frames = [
        {
            "filename": "/home/\x1b]0;owned\x07/\x1b[31mtrain.py",
            "line": 3,
            "name": "f\x9b2J",
            "text": "\x1b[2Jx",
        }
    ]
    events = [{"action": "alloc", "addr": 1, "size": 512, "frames": frames}]
    (tmp_path / "m.pickle").write_bytes(pickle.dumps({"device_traces": [events], "segments": []}))
    shown = run("explain", str(tmp_path / "m.pickle")).stdout
    assert "\\x1b[31mtrain.py:3 \\x1b[2Jx" in shown
    (tmp_path / "\x1b[31m.py").write_text("x = 5")
    (tmp_path / "c.json").write_text('{"model_type": "\\u001b[31m"}')
    others = [
        ["explain", str(tmp_path / "\x1b[31m.py")],
        ["predict", str(tmp_path / "c.json")],
        ["predict", "\x1b[31m"],
    ]
    for text in (shown, *(run(*words).output for words in others)):
        assert text and not {"\x1b", "\x07", "\x9b"} & set(text)


def test_a_snapshot_names_no_file_that_is_read_but_python(tmp_path):
    """Its names are anybody's: a device would have no end, and a secret would be shown."""
    (tmp_path / "secret.txt").write_text("password\n")
    names = [
        "/dev/zero",
        str(tmp_path / "secret.txt"),
        str(tmp_path / "secret.txt>"),
        "/x/ipykernel_1/../../dev/zero",
    ]
    (tmp_path / "zero.py").symlink_to("/dev/zero")
    frames = [
        {"filename": name, "line": 1, "name": "f"} for name in (*names, str(tmp_path / "zero.py"))
    ]
    events = [
        {"action": "alloc", "addr": i, "size": 512, "frames": [frame]}
        for i, frame in enumerate(frames)
    ]
    (tmp_path / "m.pickle").write_bytes(pickle.dumps({"device_traces": [events], "segments": []}))
    result = run("explain", str(tmp_path / "m.pickle"))
    assert result.exit_code == 0 and "password" not in result.stdout


@pytest.mark.parametrize(
    "change",
    [{"size": "large"}, {"frames": [{"line": 1}]}, {"frames": 5}, {"size": None}, {"action": None}],
)
def test_a_snapshot_with_a_broken_event_is_one_sentence(change, tmp_path):
    event = {"action": "alloc", "addr": 1, "size": 512, "frames": []} | change
    (tmp_path / "m.pickle").write_bytes(pickle.dumps({"device_traces": [[event]], "segments": []}))
    refused(run("explain", str(tmp_path / "m.pickle")))


# --- what is written


def test_a_program_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    text = (
        '"""Train.\n\nWritten by vramlab 1"""\n'  # as the real ones begin: making one loads torch
    )
    monkeypatch.setattr("vramlab.planning.plan.scripts", lambda recipe, name, said: {name: text})
    words = [
        "plan",
        "gpt2",
        "--gpu",
        "T4",
        "--method",
        "lora",
        "--no-confirm",
        "--write",
        str(tmp_path / "train.py"),
    ]
    first = run(*words)
    assert first.exit_code == 0 and "wrote " in first.stderr
    before = (tmp_path / "train.py").read_text()
    again = run(*words)
    assert (
        again.exit_code == 0
        and "replaced " in again.stderr
        and (tmp_path / "train.py").read_text() == before
    )

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        result = run(*words)
    assert result.exit_code == 2 and result.stderr.endswith(
        "train.py could not be written (No space left on device); it is as it was before.\n"
    )
    assert (tmp_path / "train.py").read_text() == before and [*tmp_path.iterdir()] == [
        tmp_path / "train.py"
    ]


def test_a_file_of_others_is_not_written_over(tmp_path, monkeypatch):
    monkeypatch.setattr("vramlab.planning.plan.scripts", lambda recipe, name, said: {name: "text"})
    mine = tmp_path / "train.py"
    mine.write_text("print('mine')\n")
    refused(
        run("plan", "gpt2", "--gpu", "T4", "--write", str(mine)),
        "vramlab did not write the file that is there",
    )
    for name in ("--report", "--snapshot"):
        refused(
            run("run", "--gpu", "T4", name, str(mine), "--", "python", "x.py"),
            "vramlab did not write the file",
        )
    found = plan("gpt2", "T4", method="lora", confirm=False)
    with pytest.raises(
        RecipeError, match=r"train\.py', but vramlab did not write the file that is there"
    ):
        found.write(mine)
    assert mine.read_text() == "print('mine')\n" and [*tmp_path.iterdir()] == [mine]


def test_what_goes_with_a_program_is_not_written_over_either(tmp_path, monkeypatch):
    texts = {"train.py": "\nWritten by vramlab 1", "train.fsdp.json": "{}\n"}
    monkeypatch.setattr("vramlab.planning.plan.scripts", lambda recipe, name, said: texts)
    found = plan("gpt2", "T4", method="lora", confirm=False)
    (tmp_path / "train.fsdp.json").write_text("mine")
    with pytest.raises(RecipeError, match=r"train\.fsdp\.json', but vramlab did not write"):
        found.write(tmp_path / "train.py")
    assert [path.name for path in tmp_path.iterdir()] == ["train.fsdp.json"]
    with pytest.raises(FileError, match="could not be written"):
        found.write(tmp_path / "none" / "train.py")
    (tmp_path / "train.fsdp.json").unlink()
    for _ in range(2):
        assert found.write(tmp_path / "train.py") == [tmp_path / name for name in texts]


# --- how it is started

STARTS = {
    "cp1252": ("PYTHONIOENCODING=cp1252 {} predict gpt2", 0, "gpt2 · batch 1", ""),
    "ascii": ("PYTHONIOENCODING=iso8859-5 {} predict gpt2", 0, "gpt2 - batch 1 - 512 tokens", ""),
    "ascii help": ("PYTHONIOENCODING=ascii {} predict --help", 0, "Memory by formula", ""),
    "closed": (
        "{} predict gpt2 >&-",
        2,
        "",
        "The output could not be written (standard output is closed).\n",
    ),
    "closed errors": ("{} predict gpt2 2>&-", 0, "peak ", ""),
    "full": (
        "{} predict gpt2 > /dev/full",
        2,
        "",
        "The output could not be written (No space left on device).\n",
    ),
    "full help": (
        "{} --help > /dev/full",
        2,
        "",
        "The output could not be written (No space left on device).\n",
    ),
    "head": ("{} predict gpt2 --json | true; exit $((PIPESTATUS[0] > 1))", 0, "", ""),
    "-OO": ("{python} -OO -m vramlab predict gpt2", 2, "", "leave out -OO, or say -O.\n"),
    "folder": (
        "mkdir x; cd x; rmdir ../x; {} predict gpt2",
        2,
        "",
        "The working directory was removed, ",
    ),
    "pipe": ("head -c 1M /dev/zero | {} explain -", 2, "", "this is no out-of-memory message"),
    # more than MOST_TEXT, which takes seconds to look through
    "flood": ("head -c 70M /dev/zero | {} explain -", 2, "", "this is no out-of-memory message"),
    "closed input": ("{} explain - <&-", 2, "", "standard input is closed"),
}


@POSIX
@pytest.mark.parametrize("name", params(STARTS, STARTS.keys() - {"flood"}))
def test_it_is_started_in_odd_ways(name, tmp_path):
    line, status, out, err = STARTS[name]
    line = line.format(f"{sys.executable} -m vramlab", python=sys.executable)
    path = os.pathsep.join(os.path.abspath(place) for place in sys.path if place)
    environment = {**os.environ, "PYTHONPATH": path, "TERM": "dumb"}
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True)
    shown = done.stdout.decode("cp1252" if name == "cp1252" else "utf-8")
    assert done.returncode == status and out in shown, done
    assert err in done.stderr.decode() and done.stderr.count(b"\n") == bool(err), done.stderr


def test_of_what_is_piped_in_only_so_much_is_read(monkeypatch):
    message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert CliRunner().invoke(app, ["explain", "-"], input=message).exit_code == 0
    monkeypatch.setattr(command_output, "MOST_TEXT", 8)
    done = CliRunner().invoke(app, ["explain", "-"], input=message)
    assert done.exit_code == 2 and "this is no out-of-memory message" in done.stderr


def test_an_order_of_samples_without_samples_is_refused():
    refused(
        run("predict", "gpt2", "--train-sampling-strategy", "sequential"), "name their file too"
    )
