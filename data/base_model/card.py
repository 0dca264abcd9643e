"""The base model's card, written from what `train.py` measured, and the compressors that the model
is held against.
"""

import json
import lzma
import zlib
from pathlib import Path


def compressed(texts: list[str], before: str = "") -> dict[str, float]:
    """Bits per byte of general compressors at their strongest setting.

    Args:
        before: text that an archive already holds; then also what `texts` add to it.
    """

    def small(data: bytes) -> int:
        return len(lzma.compress(data, format=lzma.FORMAT_ALONE, preset=9 | lzma.PRESET_EXTREME))

    parts = [text.encode() for text in texts]
    whole, size = b"".join(parts), sum(map(len, parts))
    result = {
        "zlib, file by file": sum(len(zlib.compress(part, 9)) for part in parts),
        "zlib, all in one": len(zlib.compress(whole, 9)),
        "lzma, file by file": sum(map(small, parts)),
        "lzma, all in one": small(whole),
    }
    if before:
        result["lzma, after the training text"] = small(before.encode() + whole) - small(
            before.encode()
        )
    return {name: 8 * n / size for name, n in result.items()}


def _table(head: tuple[str, str], rows: dict[str, object]) -> str:
    said = {
        name: f"{value:.3f}" if isinstance(value, float) else value for name, value in rows.items()
    }
    lines = [f"| {name} | {value} |" for name, value in said.items()]
    return "\n".join([f"| {head[0]} | {head[1]} |", "|---|---|", *lines])


def write_card(folder: Path, facts: dict) -> None:
    """`README.md`, the model card, and `card.json`, the same facts for programs."""
    (folder / "card.json").write_text(json.dumps(facts, indent=1) + "\n")
    model, done, prose = facts["model"], facts["training"], facts["documentation bytes"]
    left_out = f"{facts['held-out files']} held-out files of {facts['held-out bytes']:,} bytes"
    read = (
        f"{done['tokens read'] / 1e6:.1f} million tokens, "
        f"{done['tokens read'] / facts['tokens']:.1f} times the data"
    )
    ends = ", ".join(
        f"from step {first:,} for an end at {end:,}" for first, end in done["schedule"]
    )
    replanned = f" (planned anew while it ran: {ends})" if len(done["schedule"]) > 1 else ""
    about = {
        "parameters": f"{model['parameters']:,}: Llama, {model['layers']} layers of width "
        f"{model['width']}, "
        f"vocabulary {model['vocabulary']:,}, head tied to the embedding",
        "data": f"the standard library of Python {facts['python']}: {facts['files']:,} files, "
        f"{facts['bytes']:,} bytes, "
        f"{facts['tokens']:,} tokens",
        "left out": f"tests, `site-packages`, `encodings`, `pydoc_data`; and {left_out}",
        "tokenizer": f"byte-level BPE of the same files; {facts['bytes'] / facts['tokens']:.2f} "
        f"bytes per token",
        "training": f"{done['steps']:,} steps × {done['batch size']} × {done['context']} tokens: "
        f"{read}",
        "recipe": f"AdamW (β 0.9 and 0.95; weight decay 0.1 on matrices), peak rate "
        f"{done['learning rate']:g}, warm-up over "
        f"5 % of the steps, then cosine{replanned}; gradients clipped at 1; bf16 autocast on "
        f"fp32 weights; "
        f"seed {facts['seed']}",
        "loss": f"{done['loss']:.3f} nats per token, mean of the last 100 training batches",
        "time": f"{done['minutes']:.0f} minutes on {facts['hardware']}",
        "file": f"`model.safetensors`, fp16, {facts['file bytes']:,} bytes; nothing here is "
        f"pickled",
        "versions": facts["versions"],
    }
    (folder / "README.md").write_text(
        f"""# The course's base model

A small causal language model, trained from nothing by `train.py` in this folder on Python \
programs. It exists so that
quantization and fine-tuning can be seen on weights that mean something, on every machine, without \
a download. It is no
assistant: it continues Python source code, more or less.

{_table(("", ""), about)}

## How good it is: bits per byte, less is better

On the held-out programs. A file's first bytes are predicted from the start token alone; windows \
of {done["context"]} tokens,
moved by half. "All in one" lets a compressor see the held-out files one after another; "after the \
training text" is what
they add to an archive of all files that the model was trained on, so that repeats of known code \
are free to it as well.

{_table(("", "bits per byte"), facts["bits per byte"])}

On the held-out documentation, before any fine-tuning:

{_table(("", "bits per byte"), facts["documentation"])}

## Texts in this folder

`held_out.json`: the held-out programs. `documentation_train.json` ({prose[0]:,} bytes) and \
`documentation_held_out.json`
({prose[1]:,} bytes): topics of the language reference (`pydoc_data`), the second domain, on which \
chapters fine-tune; no
paragraph of 40 characters or more is in both. They are stored because other Python versions have \
other texts. These
texts, and the programs that the model was trained on, are © Python Software Foundation, under the \
PSF License
Agreement, version 2.
""",
        encoding="utf-8",
    )
