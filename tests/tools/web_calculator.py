"""What the site's calculator loads, and the calculator as a page by itself.

It loads Pyodide from its npm package, vramlab and its data as an archive, and usual answers.
"""

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from pathlib import Path
from types import ModuleType

from settings import ROOT, repository_url
from vramlab import GiB, LoRA, Quantization, Recipe, find_gpu, predict, read_shape
from vramlab.recipe.families import FAMILIES
from vramlab.recipe.shapes import catalogue
from vramlab_course.calculator import UNSET

VERSION = "314.0.7"
PACKAGE = f"https://registry.npmjs.org/pyodide/-/pyodide-{VERSION}.tgz"
SHA512 = (
    "d18bd7c4485f11da4b7dbfd790cd8114078c44eab488c517d9bcf31fda4eb6dc"
    "8c716930abe1db139bb2b860fcd8b37bcb6abe48dbe2ffa579244b0e943d91d4"
)
FILES = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "pyodide-lock.json",
    "python_stdlib.zip",
)
COURSE = (
    "claims.json",
    "many_lengths.json",
    "published_results.json",
    "published_runs.json",
    "wanted.json",
)  # data that no prediction reads
USUAL = (
    "qwen3-0.6b",
    "llama-3.2-1b",
    "gemma-2-2b",
    "qwen3-4b",
    "mistral-7b",
    "llama-3.1-8b",
    "qwen3-14b",
    "llama-3.1-70b",
)


def fetch_pyodide(folder: Path) -> Path:
    """Return the folder of Pyodide's files, from the npm registry the first time.

    Raises ValueError for another package.
    """
    place = folder / f"pyodide-{VERSION}"
    # A download that was broken off leaves some of them.
    if not all((place / name).is_file() for name in FILES):
        with urllib.request.urlopen(PACKAGE, timeout=120) as answer:
            package = answer.read()
        # The page runs what is in it, so it must be the package that was looked at.
        if (found := hashlib.sha512(package).hexdigest()) != SHA512:
            raise ValueError(
                f"{PACKAGE} has the SHA-512 sum {found}, which is not the one written down here."
            )
        place.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(package)) as archive:
            for name in FILES:
                (place / name).write_bytes(archive.extractfile(f"package/{name}").read())
    return place


def known_models() -> list[str]:
    """The models of the catalogue that predict knows.

    Those are the ones whose weights are written down, but no encoder–decoder.
    """
    families = {
        name: FAMILIES.get(json.loads(entry["config"])["model_type"])
        for name, entry in catalogue().items()
    }
    written = [
        name for name, family in families.items() if family and family.layout_options is not None
    ]
    return [name for name in written if not read_shape(name).num_decoder_layers]


def write_archive(path: Path) -> None:
    """Write what the page's Python imports.

    That is vramlab, the data it reads, and the page's bridge to it.

    Models that predict does not know stay out.
    """
    models = [ROOT / "data" / "models" / f"{name}.json" for name in known_models()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        course = [
            ROOT / "helpers" / "vramlab_course" / name for name in ("__init__.py", "calculator.py")
        ]
        for file in [*sorted((ROOT / "helpers" / "vramlab").rglob("*.py")), *course]:
            archive.write(file, file.relative_to(ROOT))
        data = sorted(file for file in (ROOT / "data").glob("*.json") if file.name not in COURSE)
        for file in [*data, *models]:
            archive.write(file, file.relative_to(ROOT))
        archive.write(ROOT / "site" / "static" / "calculator" / "bridge.py", "bridge.py")


def lay_out(place: Path, pyodide: Path) -> None:
    """Complete the calculator's folder.

    It gets the archive, Pyodide's files, and what the page shows at once.
    """
    write_archive(place / "vramlab.zip")
    shutil.copytree(pyodide, place / "pyodide")
    write_start(place)


SPACE = """---
title: GPU memory calculator
emoji: 📏
colorFrom: blue
colorTo: green
sdk: static
app_file: index.html
license: apache-2.0
short_description: Does my training fit this GPU, byte by byte
---
# Does my training fit?

The calculator of [VRAM Lab]({repository}), as `make site` writes it: a page without a server, which
runs `vramlab.predict` in the browser and sends nothing anywhere.
"""
# The page by itself: colours that the site's theme would give, in light and in dark.
ALONE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Does my training fit? A GPU memory calculator</title>
<link rel="icon" href="favicon.svg">
<link rel="stylesheet" href="calculator/calculator.css">
<style>
:root {{
  color-scheme: light dark;
  --pst-color-text-base: light-dark(#222832, #ced6dd);
  --pst-color-text-muted: light-dark(#48566b, #9ca4af);
  --pst-color-background: light-dark(#fff, #14181e);
  --pst-color-surface: light-dark(#f3f4f5, #222832);
  --pst-color-border: light-dark(#d1d5da, #48566b);
}}
body {{
  font-family: system-ui, sans-serif; line-height: 1.5; max-width: 62rem; margin: 0 auto;
  padding: 0 1rem; color: var(--pst-color-text-base); background: var(--pst-color-background);
}}
</style>
<main>
<h1>Does my training fit?</h1>
<p>Say what you train and how; the page predicts the peak, byte by byte, in your browser.
<a href="{repository}">How, and how exact it is</a>.</p>
<div id="calculator"></div>
</main>
<script type="module" src="calculator/calculator.js"></script>
</html>
"""


def write_space(folder: Path, pyodide: Path) -> None:
    """Write the calculator as a page by itself, in the form of a static Space of Hugging Face."""
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    static = ROOT / "site" / "static"
    place = shutil.copytree(static / "calculator", folder / "calculator", ignore=ignored)
    lay_out(place, pyodide)
    shutil.copy(static / "favicon.svg", folder)
    for name, text in (("README.md", SPACE), ("index.html", ALONE)):
        (folder / name).write_text(text.format(repository=repository_url()), encoding="utf-8")


ASK = """
import sys
sys.path[:0] = ["helpers", "."]
import bridge
print(bridge.page(), bridge.answer("{}"), sep="\\n")
"""


def write_start(place: Path) -> None:
    """Write start.json: the page's controls, the answer to its beginning, and sizes.

    Asked of the archive itself, which has fewer models than the catalogue. `bytes` is what
    `worker.js` counts while it loads, `transfer` what a server sends compressed.
    """
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(place / "vramlab.zip").extractall(folder)
        # Isolated and without site-packages, as in the browser: what imports torch or numpy fails
        # here.
        words = [sys.executable, "-I", "-S", "-c", ASK]
        asked = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    page, answer = asked.stdout.splitlines()
    files = [place / "vramlab.zip", *(place / "pyodide" / name for name in FILES)]
    counted = [file for file in files if file.suffix != ".mjs"]
    start = json.loads(page) | {
        "answer": json.loads(answer),
        "bytes": sum(file.stat().st_size for file in counted),
        "transfer": sum(len(gzip.compress(file.read_bytes(), 6)) for file in files),
    }
    text = json.dumps(start, separators=(",", ":"))
    (place / "start.json").write_text(text, encoding="utf-8")


def the_bridge() -> ModuleType:
    """The page's bridge, imported here."""
    sys.path.insert(0, str(ROOT / "site" / "static" / "calculator"))
    import bridge

    return bridge


WAYS = {  # of the first page's short form: what differs from where the calculator begins
    "QLoRA": {"quantization": "nf4", "dtype": UNSET},
    "LoRA": {},
    "all weights": {"lora_r": UNSET, "dtype": UNSET},
}
CARDS = (
    "T4",
    "RTX 3060 12GB",
    "RTX 4060 Ti 16GB",
    "RTX 3090",
    "RTX 4090",
    "RTX 5090",
    "A100 40GB",
    "L40S",
    "H100 SXM",
    "H200",
)


def quick_answers() -> str:
    """The first page's short form as MyST.

    It has answers for some models, ways and cards, said by the calculator's code.
    """
    bridge = the_bridge()
    known = {name: find_gpu(name).total for name in CARDS}
    needs = {
        model: {
            way: {card: _answer(bridge, {"model": model, "gpu": card, **fields}) for card in known}
            for way, fields in WAYS.items()
        }
        for model in USUAL
    }
    data = {
        "cards": known,
        "ways": WAYS,
        "needs": needs,
        "start": ["llama-3.1-8b", "QLoRA", "RTX 4090"],
    }
    # A "</script>" in a text would end the element.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'```{{raw}} html\n<div id="quick"><script '
        f'type="application/json">{text}</script></div>\n```\n'
    )


def _answer(bridge: ModuleType, state: dict) -> list:
    """Return what the process takes in GiB (lower end, likely, upper end), the tier, and changes.

    On a card that lacks bf16 the changes say fp16.
    """
    half = bridge.fp16_for(bridge.BEGIN | state)
    said = json.loads(bridge.answer(json.dumps(state | half)))
    return [*(round(size / GiB, 2) for size in said["process"]), said["tier"], half]


def usual_answers() -> str:
    """A Markdown table for who has no JavaScript.

    It has what usual models take, and the smallest tier on an RTX 4090.
    """
    card = find_gpu("RTX 4090")
    lora = LoRA(r=16, target_modules="all-linear")
    ways = {
        "all weights": {},
        "LoRA": {"lora": lora, "dtype": "bfloat16"},
        "QLoRA": {"lora": lora, "quantization": Quantization("nf4", prepare=False)},
    }
    lines = [f"| model | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
    for model in USUAL:
        cells = []
        for fields in ways.values():
            recipe = Recipe(
                model, 1, 2048, "bf16-mixed", gradient_checkpointing=True, trainer="sft", **fields
            )
            need = predict(recipe, gpu=card).process
            cells.append(f"{need.value / GiB:.1f} {need.verdict(card.total)}")
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
