"""The GitHub Action, without GitHub: a repository with two commits, and a server that answers as
its API does.
"""

import json
import os
import runpy
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from settings import ROOT
from vramlab import Recipe, predict

MARKER = "<!-- memory of training steps -->"
COMMAND = 'test ! -f fails && cp reports/*.json "$REPORTS" && test -z "$GITHUB_TOKEN"'


def git(folder, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A pull request that doubles a batch and adds a report."""
    folder = tmp_path / "checkout"
    (folder / "reports").mkdir(parents=True)
    git(folder, "init", "-q")
    for batches in ({"small": 1, "old": 1}, {"small": 2, "new": 1}):
        for file in (folder / "reports").glob("*"):
            file.unlink()
        for name, size in batches.items():
            (folder / "reports" / f"{name}.json").write_text(
                predict(Recipe("gpt2", batch_size=size)).to_json()
            )
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", "a commit")
    return folder


@pytest.fixture
def api():
    """GitHub's comments on a pull request.

    `comments` are what is there, `refuses` a status for all that is written.
    """

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            length = int(self.headers.get("Content-Length", 0))
            content = json.loads(self.rfile.read(length)) if length else None
            status, found = 200, []
            if self.command == "GET":
                found = self.server.comments if "page=1" in self.path.split("&")[-1] else []
            elif self.server.refuses:
                status = self.server.refuses
            elif self.command == "PATCH":
                self.server.comments[int(self.path.rpartition("/")[2])]["body"] = content["body"]
            else:
                self.server.comments.append(
                    {"id": len(self.server.comments), "body": content["body"]}
                )
            self.server.asked.append((self.command, self.path, self.headers["Authorization"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        do_GET = do_POST = do_PATCH = answer

        def log_message(self, *unused):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.comments, server.asked, server.refuses = [{"id": 0, "body": "looks good"}], [], None
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run(repository, api, command=COMMAND, **event):
    event = event or {
        "pull_request": {"number": 7, "base": {"sha": git(repository, "rev-parse", "HEAD~1")}}
    }
    (repository.parent / "event.json").write_text(json.dumps(event))
    environment = {
        **{name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
        "COMMAND": command,
        "GITHUB_TOKEN": "secret",
        "GITHUB_REPOSITORY": "ann/tools",
        "GITHUB_API_URL": f"http://127.0.0.1:{api.server_port}",
        "GITHUB_EVENT_PATH": str(repository.parent / "event.json"),
        "GITHUB_STEP_SUMMARY": str(repository.parent / "summary.md"),
    }
    script = [sys.executable, str(ROOT / "action" / "comment.py")]
    return subprocess.run(script, cwd=repository, env=environment, capture_output=True, text=True)


def test_a_pull_request_gets_one_comment_that_is_kept_current(repository, api):
    for _ in range(2):
        done = run(repository, api)
        assert (done.returncode, done.stderr) == (0, "")
    assert [body["body"][: len(MARKER)] for body in api.comments] == ["looks good", MARKER]
    assert [
        (method, path.partition("?")[0]) for method, path, _ in api.asked if method != "GET"
    ] == [
        ("POST", "/repos/ann/tools/issues/7/comments"),
        ("PATCH", "/repos/ann/tools/issues/comments/1"),
    ]
    assert {token for *_, token in api.asked} == {"Bearer secret"}
    text = api.comments[1]["body"]
    one, two = (predict(Recipe("gpt2", batch_size=n)).peak.total for n in (1, 2))
    assert f"| small | {one / 2**30:.3f} GiB | {two / 2**30:.3f} GiB | {two - one:+,} B" in text
    assert (
        f"| old | {one / 2**30:.3f} GiB | – |  |" in text
        and f"| new | – | {one / 2**30:.3f} GiB |  |" in text
    )
    assert "<details><summary>small</summary>" in text and "note: B is gpt2 · batch 2" in text
    assert Path(repository.parent / "summary.md").read_text() == text
    assert (
        len(git(repository, "worktree", "list").splitlines()) == 1
        and git(repository, "status", "--short") == ""
    )


def test_a_token_that_may_only_read_leaves_the_summary(repository, api):
    api.refuses = 403
    done = run(repository, api)
    assert (
        done.returncode == 0
        and "::warning::the comment could not be written (HTTP Error 403" in done.stdout
    )
    assert MARKER in (repository.parent / "summary.md").read_text()


def test_what_cannot_be_compared_is_said(repository, api):
    assert "no pull request" in run(repository, api, ref="main").stdout
    done = run(repository, api, command="true")
    assert done.returncode == 1 and "::error::the command wrote no report" in done.stdout
    (repository / "only-here").touch()
    done = run(repository, api, command=f"test -f only-here && {COMMAND}")
    assert done.returncode == 0 and "the base has no reports" in done.stdout
    assert run(repository, api, command="exit 3").returncode != 0


def test_the_action_runs_the_script_with_what_it_reads():
    action = yaml.safe_load((ROOT / "action" / "action.yml").read_text())
    (step,) = action["runs"]["steps"]
    assert (
        step["run"] == 'python "$GITHUB_ACTION_PATH/comment.py"'
        and (ROOT / "action" / "comment.py").exists()
    )
    assert step["env"] == {
        "COMMAND": "${{ inputs.command }}",
        "GITHUB_TOKEN": "${{ inputs.token }}",
    }
    assert action["inputs"].keys() == {"command", "token"}


def test_nothing_of_a_report_is_markup_in_the_comment():
    """The pull request writes them, and its comment is the repository's."""
    comment = runpy.run_path(str(ROOT / "action" / "comment.py"))
    old, new = (predict(Recipe("gpt2", batch_size=size)) for size in (1, 2))
    new.title = "````\n<img src=x> @all \x1b[2J"
    body = comment["body"]({"<b>a|b": old}, {"<b>a|b": new})
    assert (
        r"| \<b\>a\|b |" in body
        and "<summary>&lt;b&gt;a|b</summary>" in body
        and "\x1b" not in body
    )
    fences = [line for line in body.splitlines() if line == "`" * 5]
    inside = body.split("`" * 5)[1]
    assert len(fences) == 2 and "<img" in inside and body.count("<img") == inside.count("<img")
