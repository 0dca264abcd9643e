"""`vramlab run`: any script on any GPU, without the GPU.

The command runs in PyTorch's CUDA build, on stand-ins for CUDA's libraries (`data/stand_in`):
dispatcher, autograd, host code of kernels and caching allocator are PyTorch's own, and so is the
OutOfMemoryError where the card would give it.
"""

import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.files import write_atomically
from ..hardware.contexts import context_on
from ..hardware.gpu import Gpu
from ..hardware.snapshot import SnapshotError, read_snapshot
from ..measurement.stand_in import StandInError, libraries, variables
from ..report.report import Bytes, Interval, Report, environment, format_bytes
from .in_script import FOLDER, SITE, STEPS

LIMITS = (
    "experimental: no kernel ran. Values are zeros, so what a script decides by them (a loss "
    "that is not finite, early "
    "stopping, sampled tokens, routed experts) is not followed, a mask selects everything, and "
    "times mean nothing",
    "what the context holds is an estimate, by far the least certain figure here",
)


@dataclass
class ScriptRun:
    """What a script held on a card: its exit `status`.

    For each process that used CUDA, by rank, a report and what its allocator's history says.
    """

    command: str
    card: Gpu
    status: int
    reports: list[Report]
    histories: list[str]

    def __str__(self) -> str:
        lines = [f"emulated: {self.command}", str(self.card)]
        # Before the figures: they are of a process that did not end by itself.
        if killed(self.status):
            lines += [killed(self.status)]
        for report, history in zip(self.reports, self.histories, strict=True):
            rank = f"rank {report.environment['rank']}: " if len(self.reports) > 1 else ""
            peaks = (
                f"{format_bytes(report.allocated or 0)} allocated, "
                f"{format_bytes(int(report.reserved or 0))} reserved"
            )
            lines.append(f"{rank}peaks {peaks}; with CUDA's context {report.process}")
            if report.phases and report.status == "ok":
                lines.append(
                    # Both tiers stand in the line above with the process, so the report leaves them
                    # out.
                    str(dataclasses.replace(report, reserved=None, process=None, notes=[]))
                )
            lines += [history, report.message]
        none = "no Python process of it that has vramlab held memory of the card"
        if self.reports:
            lines += [f"note: {note}" for note in LIMITS]
        else:
            lines += [none]
        return "\n".join(filter(None, lines))


def run(
    command: Sequence[str],
    card: Gpu,
    count: int = 1,
    snapshot: Path | None = None,
    steps: int | None = None,
) -> ScriptRun:
    """Run `command` on the stand-in for `count` such cards and return what its processes held.

    `snapshot` is a file for memory_viz, of the process that held most; after `steps` optimizer
    steps each process ends.

    Raises StandInError where the command or a part of the stand-in is missing.
    """
    if not shutil.which(command[0]):
        raise StandInError(
            f"vramlab run finds no program {command[0]!r}: it takes a command such as python "
            f"train.py."
        )
    # Raises where a part of the stand-in is missing, before anything is started.
    preloaded = libraries()
    own = {
        # Before the real libraries, so that torch binds to the stand-in's symbols.
        "LD_PRELOAD": ":".join(map(str, preloaded)),
        # Triton looks for libcuda.so by itself, and not by the loader's search.
        "TRITON_LIBCUDA_PATH": str(preloaded[0].parent),
    }
    with tempfile.TemporaryDirectory() as folder:
        # Python imports a module of this name at its start, before the script, in each process that
        # inherits the path.
        Path(folder, "sitecustomize.py").write_text(SITE)
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        own |= {"PYTHONPATH": os.pathsep.join(paths), FOLDER: folder, STEPS: str(steps or "")}
        # Later entries win: what the user's shell says of CUDA must not reach the stand-in.
        status = _status(command, {**os.environ, **own, **variables(card, count)})
        left = [
            (json.loads(path.read_text()), path.with_suffix(".pickle"))
            for path in Path(folder).glob("*.json")
        ]
        # Launchers and data loaders import torch too, and hold nothing.
        left = sorted((one for one in left if one[0]["allocated"]), key=lambda one: one[0]["rank"])
        if snapshot and left:
            write_atomically(
                snapshot,
                max(left, key=lambda one: one[0]["allocated"])[1].read_bytes(),
            )
        reports = [_report(preloaded, shlex.join(command), card, status) for preloaded, _ in left]
        return ScriptRun(
            shlex.join(command),
            card,
            status,
            reports,
            [_history(path) for _, path in left],
        )


def _status(command: Sequence[str], variables: dict[str, str]) -> int:
    """Run the command and return its exit status; Ctrl-C reaches it, and its end is waited for."""
    with subprocess.Popen(command, env=variables) as child:
        # The terminal sends Ctrl-C to both; ignored here, and only after the child was started, it
        # ends the child alone.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            status = child.wait()
        finally:
            signal.signal(signal.SIGINT, before)
    # Popen gives the negative number of a signal; shells say 128 and the number.
    return status if status >= 0 else 128 - status


def killed(status: int) -> str:
    """Return by which signal a command of that exit status ended, and what that mostly means.

    "" where by none.
    """
    number = status - 128
    if number not in set(signal.Signals) or number == signal.SIGINT:
        return ""
    name = signal.Signals(number).name
    why = (
        "; mostly Linux's, because the machine's own memory ran out: dmesg says so"
        if name == "SIGKILL"
        else ""
    )
    return f"the command was killed by signal {number} ({name}){why}"


def _report(
    process_facts: dict[str, Any],
    command: str,
    card: Gpu,
    status: int,
) -> Report:
    """Return the report of one process.

    What no Trainer's watched step explains is "unexplained".
    """
    # Without a watched step all that is known is how much there was, and no category of it.
    held = Bytes(unexplained=process_facts["allocated"])
    seen = Report.from_dict(process_facts["report"]) if process_facts["report"] else None
    seen = seen or Report("emulated", None, command, "cuda", {}, held, "")
    state = "error" if status else "ok"
    message = (killed(status) or f"the command ended with status {status}") if status else ""
    # The allocator counts refused requests, also of those that a script caught and survived.
    if status and process_facts["failed_requests"]:
        state = "oom"
        message = f"{card.name} ran out of memory, and the command ended with status {status}"
    return dataclasses.replace(
        seen,
        status=state,
        message=message,
        allocated=process_facts["allocated"],
        reserved=process_facts["reserved"],
        # What the allocator reserved is counted exactly; only the context is an interval.
        process=Interval.of(process_facts["reserved"]) + context_on(card),
        environment=environment(gpu=card.name, rank=process_facts["rank"]),
        notes=[*LIMITS],
    )


def _history(path: Path) -> str:
    try:
        return str(read_snapshot(path))
    except SnapshotError as error:
        return f"no history: {error}"
