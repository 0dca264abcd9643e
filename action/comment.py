"""Comment on a pull request how the memory of its training steps changed; see action.yml.

The environment is that of a GitHub Action, with COMMAND besides: what writes reports into the
folder REPORTS.
"""

import html
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from vramlab import Report, diff, format_bytes
from vramlab.base.files import read_text
from vramlab.base.text import markdown

MARKER = "<!-- memory of training steps -->"  # by which an earlier comment is found, and replaced


def reports(command: str, checkout: str | Path) -> dict[str, Report]:
    """Run the command in a checkout; the reports that it writes, by file name."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "REPORTS": folder}
        environment.pop("GITHUB_TOKEN", None)  # the command is the pull request's
        subprocess.run(["bash", "-ec", command], cwd=checkout, env=environment, check=True)
        return {
            path.stem: Report.from_json(read_text(path))
            for path in sorted(Path(folder).glob("*.json"))
        }


def of_base(command: str, commit: str) -> dict[str, Report]:
    """The reports of another commit."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", folder, commit], check=True
        )
        try:
            return reports(command, folder)
        except subprocess.CalledProcessError as error:
            print(f"::warning::the base has no reports: the command ended with {error.returncode}")
            return {}
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], check=True)


def body(before: dict[str, Report], after: dict[str, Report]) -> str:
    """The comment: a line for each report, and the differences folded under it."""
    lines = [
        MARKER,
        "### Memory of training steps",
        "",
        "| | base | here | change |",
        "|---|--:|--:|--:|",
    ]
    details = []
    for name in sorted(before.keys() | after.keys()):
        pair = [found.get(name) for found in (before, after)]
        known = [report is not None and report.status == "ok" for report in pair]
        sizes = [
            format_bytes(report.peak.total) if ok else report.status if report else "–"
            for report, ok in zip(pair, known, strict=True)
        ]
        change = ""
        if all(known):
            found = diff(*pair)
            more, share = found.differences("peak total")["B"]
            change = f"{more:+,} B ({share:+.2%})" if more else "0"
            moved = any(
                found.differences(row.name).get("B", (0,))[0]
                for row in found.rows
                if row.name != "phase"
            )
            details += [_folded(name, str(found))] if moved else []
        lines.append(f"| {markdown(name)} | {sizes[0]} | {sizes[1]} | {change} |")
    return "\n".join([*lines, "", *details])


def _folded(name: str, text: str) -> str:
    """The text as it is, folded under its name; a fence longer than any in it, so that it cannot
    end there.
    """
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(longest + 1, 3)
    return (
        f"<details><summary>{html.escape(name)}</summary>\n\n{fence}\n{text}\n{fence}\n</details>"
    )


def ask(method: str, path: str, content: dict | None = None):
    """What GitHub's API answers."""
    headers = {
        "Authorization": f"Bearer {os.environ['GITHUB_TOKEN']}",
        "Accept": "application/vnd.github+json",
    }
    data = json.dumps(content).encode() if content else None
    url = f"{os.environ.get('GITHUB_API_URL', 'https://api.github.com')}/repos/{os.environ['GITHUB_REPOSITORY']}/{path}"
    with urllib.request.urlopen(
        urllib.request.Request(url, data, headers, method=method)
    ) as answer:
        return json.load(answer)


def comment(text: str, number: int) -> None:
    """Write the comment, over an earlier one of this action if there is one."""
    earlier, page = [], 1
    while found := ask("GET", f"issues/{number}/comments?per_page=100&page={page}"):
        earlier += [each["id"] for each in found if each["body"].startswith(MARKER)]
        page += 1
    if earlier:
        ask("PATCH", f"issues/comments/{earlier[0]}", {"body": text})
    else:
        ask("POST", f"issues/{number}/comments", {"body": text})


def main() -> int:
    event = json.loads(Path(os.environ["GITHUB_EVENT_PATH"]).read_text("utf-8"))
    if "pull_request" not in event:
        print(
            "::warning::no pull request: there is nothing to compare with, and nowhere to comment"
        )
        return 0
    command, base = os.environ["COMMAND"], event["pull_request"]["base"]["sha"]
    after = reports(command, ".")
    if not after:
        print('::error::the command wrote no report: it has to write JSON files into "$REPORTS"')
        return 1
    text = body(of_base(command, base), after)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        Path(summary).write_text(text, "utf-8")
    try:
        comment(text, event["pull_request"]["number"])
    except urllib.error.HTTPError as error:  # from a fork the token may only read
        print(f"::warning::the comment could not be written ({error}); the job's summary has it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
