"""The real training step on this machine, in a fresh process.

Each experiment has a process of its own, so nothing leaks from one to the next and running out of memory kills
no notebook: it comes back as a report. The child (`worker.py`) makes two passes, a clean one for the truth (allocator
peaks, NVML, time) and one under the tracker for the split.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from .errors import MeasurementError, RecipeError, RecordError
from .predict import predict
from .recipe import Recipe
from .records import find_record, log_wanted
from .report import Report, format_bytes

SECONDS_ON_CPU = 120
CPU_FLOPS = 2e10  # a cautious figure for two cores in fp32; half precision is slower on most CPUs


def measure(
    recipe: Recipe,
    repeats: int = 3,
    warmup: int = 2,
    *,
    device: str | None = None,
    recorded: bool | None = None,
    timeout: float = 1800,
) -> Report:
    """The memory and speed of `recipe`, measured here; or, where it does not fit this machine, as recorded on a GPU.

    Args:
        repeats, warmup: timed optimizer steps, and steps before them (two at least, so that all states exist).
        device: "cuda" or "cpu"; None takes CUDA where there is one.
        recorded: True only looks the recipe up in the records, False only runs it here, None runs it if it fits here.
        timeout: seconds after which the child is ended.
    Returns:
        source "measured" (or "recorded"), sizes in bytes; status "oom" when memory ran out, with what was asked for.
    Raises:
        MeasurementError: neither can be had; the message says why and what would do.
        RecipeError: the device cannot compute in the recipe's precision.
    """
    if repeats < 1 or warmup < 2:
        raise RecipeError("repeats", repeats, "measure needs at least 1 repeat and 2 warm-up steps")
    if stand_in := log_wanted(recipe):
        return stand_in
    device = device or _device()
    reason = "it was asked for recorded=True" if recorded else ""
    if recorded is None and device == "cpu":
        reason = why_not_here(recipe)
    if recorded or reason:
        try:
            return find_record(recipe)
        except RecordError as error:
            raise MeasurementError(f"{recipe} was not run: {reason or 'it does not fit'}; and {error}") from None
    if device == "cuda":
        _check_precision(recipe)
    return run_child(recipe, repeats, max(warmup, 2), device, timeout)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_precision(recipe: Recipe) -> None:
    from .gpu import current_device

    device = current_device()
    if device.gpu:
        device.gpu.require(recipe.precision)


def why_not_here(recipe: Recipe) -> str:
    """Why this machine's CPU does not run `recipe`, in one clause; "" when it does."""
    import psutil

    if recipe.attn_implementation == "flash_attention_2":
        return "flash-attention needs a GPU"
    free, needed = psutil.virtual_memory().available, predict(recipe).peak.total
    if needed > 0.6 * free:
        return f"it needs about {format_bytes(needed, digits=1)} and {format_bytes(free, digits=1)} of RAM are free"
    # a step costs about 6 operations a parameter and token (Kaplan et al. 2020, table 1), run some six times
    seconds = 6 * 6 * recipe.shape.num_parameters * recipe.tokens / CPU_FLOPS
    if seconds > SECONDS_ON_CPU:
        return f"it would take this CPU about {seconds / 60:,.0f} minutes"
    return ""


def run_child(recipe: Recipe, repeats: int, warmup: int, device: str, timeout: float) -> Report:
    """Run `worker` in a fresh process and read the report it leaves. Ctrl-C and timeouts end the whole process group."""
    order = {"recipe": recipe.to_dict(), "repeats": repeats, "warmup": warmup, "device": device}
    with tempfile.TemporaryDirectory(prefix="vramlab-") as folder:
        order_file, answer_file = Path(folder, "order.json"), Path(folder, "answer.json")
        order_file.write_text(json.dumps(order))
        command = [sys.executable, "-m", "vramlab.worker", str(order_file), str(answer_file)]
        with Path(folder, "stderr").open("w+") as stderr:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr, start_new_session=True, env=_environment()
            )
            try:
                code = child.wait(timeout)
            except subprocess.TimeoutExpired:
                raise MeasurementError(f"{recipe} took over {timeout:g} s and was ended: raise timeout=") from None
            finally:
                _end(child)
            stderr.seek(0)
            last_words = stderr.read().strip().splitlines()[-12:]
        if answer_file.exists():
            return _answer(json.loads(answer_file.read_text()))
    return _died(recipe, code, last_words, device)


def _environment() -> dict[str, str]:
    package = str(Path(__file__).resolve().parent.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}


def _end(child: subprocess.Popen) -> None:
    """No process of the child's group is left, however we got here."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _answer(answer: dict) -> Report:
    if "error" in answer:
        if answer["error"] == "RecipeError":
            raise RecipeError(*answer["args"])
        raise MeasurementError(answer["message"])
    return Report.from_dict(answer)


def _died(recipe: Recipe, code: int, last_words: list[str], device: str) -> Report:
    if code == -signal.SIGKILL:
        return Report.failed(
            "measured", recipe, device, "oom", "the system killed the process, as it does when memory runs out"
        )
    words = "\n".join(last_words) or "nothing was printed"
    raise MeasurementError(f"the process that measured {recipe} ended with code {code}; its last words:\n{words}")
