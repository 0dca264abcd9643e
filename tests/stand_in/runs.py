"""Recipes trained by PyTorch's CUDA build on a stand-in for a GPU: what its own allocator held, next to `simulate`.

    LD_PRELOAD=$(python -m vramlab.measurement.stand_in build/stand_in) python tests/stand_in/runs.py LIST.json OUT.json

LIST is what `vramlab record --dry-run --json` prints. STAND_IN_CAPABILITY and its neighbours (`data/stand_in/cudart.cpp`) say
which card.
What is there already is not run again. Each recipe has a process of its own.
"""

import datetime
import json
import os
import signal
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import torch
from vramlab import Recipe
from vramlab.measurement.records import write_atomically
from vramlab.measurement.worker import run

MINUTES = 5
LIBRARIES = ("torch", "transformers", "bitsandbytes", "deepspeed")


def main(wanted: Path, out: Path) -> None:
    """Run what is wanted and not yet in `out`."""
    warnings.filterwarnings("ignore")
    torch.backends.cuda.enable_cudnn_sdp(False)  # no stand-in for cuDNN: flash attention in its place
    assert "libcudart" in os.environ.get("LD_PRELOAD", ""), "the stand-in is not loaded"
    empty = {name: version(name) for name in LIBRARIES} | {"date": str(datetime.date.today()), "runs": []}
    found = json.loads(out.read_text()) if out.exists() else empty
    done = {Recipe(**each["recipe"]).key for each in found["runs"]}
    for fields in json.loads(wanted.read_text()):
        recipe = Recipe(**fields)
        if recipe.key not in done:
            found["runs"].append({"recipe": changed(recipe), **apart(recipe)})
            print(recipe, found["runs"][-1]["allocated"], flush=True)
            write_atomically(out, text(found))


def text(found: dict) -> str:
    """JSON with a line for each run."""
    runs = ",\n".join("  " + json.dumps(run) for run in found["runs"])
    return json.dumps({**found, "runs": []})[:-2] + f"\n{runs}\n]}}\n"


def apart(recipe: Recipe) -> dict:
    """The allocator's peaks in bytes, from a forked process; None for what could not be run."""
    reading, writing = os.pipe()
    if not os.fork():
        signal.alarm(60 * MINUTES)
        answer = dict.fromkeys(("allocated", "requested", "reserved"))
        try:
            report = run(recipe, 1, 2, "cuda")
            if report.status == "ok":  # what does not fit the card stays None
                answer = {name: getattr(report, name) for name in answer}
        except Exception as error:
            print(f"{recipe}: {error}", file=sys.stderr)
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        text = pipe.read()
    os.wait()
    return json.loads(text) if text else dict.fromkeys(("allocated", "requested", "reserved"))


def changed(recipe: Recipe) -> dict:
    """The fields of `recipe` that are not their defaults."""
    usual = Recipe(recipe.model, recipe.batch_size).to_dict()
    return {name: value for name, value in recipe.to_dict().items() if value != usual[name] or name in NAMED}


NAMED = ("model", "batch_size", "seq_len")

if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
