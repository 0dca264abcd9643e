"""The site's generated pages, as MyST text: what became of each claim, and the package's public names."""

import inspect
import json
import re
from collections.abc import Iterable, Mapping

from vramlab.claims import HOLDS, NOT, UNDER, WAITS, Verdict, shown
from vramlab.data import data_path

OUTCOMES = (HOLDS, UNDER, NOT, WAITS)


def sources() -> dict[str, str]:
    """The five sources' titles by letter, from the ledger's own head."""
    about = json.loads(data_path("claims.json").read_text(encoding="utf-8"))["about"]
    listed = re.search(r"Sources: (.+?)\. ", about)[1]
    return dict(entry.split(", ", 1) for entry in listed.split("; "))


def claims_page(verdicts: Iterable[Verdict], titles: Mapping[str, str]) -> str:
    """Every claim with its source, figure, finding and verdict, a section for each chapter.

    `titles` has the target and title of each chapter's page by its number, like {"02": ("notebooks/02_….ipynb", "02 · …")}.
    """
    verdicts = list(verdicts)
    parts = [_summary(verdicts)]
    for chapter in sorted({verdict.claim.chapter for verdict in verdicts}):
        own = [verdict for verdict in verdicts if verdict.claim.chapter == chapter]
        target, title = titles.get(chapter, ("", f"chapter {chapter}"))
        where = f"[chapter {chapter}]({target})" if target else f"chapter {chapter}"
        parts.append(f"## {title}\n\nTested in {where}. {_counts(own)}\n\n{_table(own)}")
    return "\n\n".join(parts) + "\n"


def _summary(verdicts: list[Verdict]) -> str:
    names = {letter: f"**{letter}** · {title}" for letter, title in sources().items()}
    rows = [(names[letter], [v for v in verdicts if v.claim.source == letter]) for letter in names]
    rows.append(("all five", verdicts))
    lines = ["| source | claims | " + " | ".join(OUTCOMES) + " |", "|---" * 6 + "|"]
    for name, own in rows:
        numbers = [len(own), *(sum(v.outcome == outcome for v in own) for outcome in OUTCOMES)]
        lines.append(f"| {name} | " + " | ".join(map(str, numbers)) + " |")
    return "\n".join(lines) + (
        "\n\n*Holds under* names the conditions under which the claim holds; under the others it does not. A finding is "
        "*derived* (arithmetic on specifications), *predicted* (closed formulas), *simulated* (the real step on tensors "
        "without contents), *measured* (here, on a CPU, when the page was made) or *recorded* (on a GPU, earlier). What "
        "waits for a GPU gets its verdict by itself as soon as `vramlab record`, or the chapter, has run on one."
    )


def _counts(verdicts: list[Verdict]) -> str:
    numbers = [sum(v.outcome == outcome for v in verdicts) for outcome in OUTCOMES]
    words = ("hold", "hold under conditions", "do not hold", "wait for a GPU record")
    said = (f"{number} {word}" for number, word in zip(numbers, words, strict=True))
    return f"{len(verdicts)} claims: {', '.join(said)}."


def _table(verdicts: list[Verdict]) -> str:
    lines = ["| claim | the source says | verdict | found, and on what |", "|---|---|---|---|"]
    for verdict in verdicts:
        claim = verdict.claim
        about = f"[`{claim.name}`]{{#{claim.name.lower()}}}<br>{_plain(claim.claim)}<br><small>{_plain(claim.place)}</small>"
        cells = (about, _plain(shown(claim.quoted, claim.unit)), f"**{_plain(verdict.text)}**", _found(verdict))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _found(verdict: Verdict) -> str:
    """Each case's finding and its configuration; a configuration that all cases share stands once, at the end."""
    several = len(verdict.findings) > 1
    configurations = {found.configuration if found else None for found in verdict.findings.values()}
    shared = several and len(configurations) == 1 and None not in configurations
    said = []
    for case, found in verdict.findings.items():
        name = f"*{_plain(case)}*: " if several or not found else ""
        if found:
            text = f"{name}{_plain(shown(found.value, verdict.claim.unit))} ({found.witness})"
            about = "" if shared else _plain(found.configuration)
        else:
            text, about = f"{name}no record yet", f"waits for {_plain(waits_for(verdict, case))}"
        said.append(f"{text}<br><small>{about}</small>" if about else text)
    if shared:
        said.append(f"<small>{_plain(configurations.pop())}</small>")
    return "<br>".join(said)


def waits_for(verdict: Verdict, case: str) -> str:
    """The hardware that a case without a finding waits for: the record's card, or what the case itself asks for."""
    if named := verdict.waits_for(case):
        return named.removeprefix("waits for ")
    if card := re.search(r"recorded .* on (.+?)\.?$", verdict.missing.get(case, "")):
        return f"a record on {card[1]}"
    asked = json.dumps(verdict.claim.cases[case])
    if found := re.search(r'"world_size": (\d+)', asked):
        return f"{found[1]} GPUs"
    return "a GPU with CUDA, of Ampere or newer" if re.search(r"tf32|bf16", asked) else "a GPU with CUDA"


def _plain(text: str) -> str:
    """Text that means itself inside a Markdown table, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|$~#])", r"\\\1", " ".join(text.split()))


def reference_page() -> str:
    """The public names by kind, each with how it is called and the first paragraph of its docstring."""
    import vramlab

    kinds: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": [], "Constants": [], "Modules": []}
    for name in vramlab.__all__:
        value = getattr(vramlab, name)
        home = vramlab._HOME[name] or name
        kind = _kind(value)
        kinds[kind].append(
            f"`{_call(name, value, kind)}`\n: {_first(name, value, kind)}\n  <small>in `vramlab.{home}`</small>"
        )
    return "\n\n".join(f"## {kind}\n\n" + "\n\n".join(entries) for kind, entries in kinds.items() if entries) + "\n"


def _kind(value: object) -> str:
    if inspect.ismodule(value):
        return "Modules"
    if inspect.isclass(value):
        return "Errors" if issubclass(value, Exception) else "Classes"
    return "Functions" if callable(value) else "Constants"


def _call(name: str, value: object, kind: str) -> str:
    if kind not in ("Functions", "Classes"):
        return name
    parameters = []
    for parameter in inspect.signature(value).parameters.values():
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else "=…"
        parameters.append(star + parameter.name + default)
    return f"{name}({', '.join(parameters)})"


def _first(name: str, value: object, kind: str) -> str:
    if kind == "Constants":
        return f"{value:,} bytes." if isinstance(value, int) else f"{value!r}."
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    if not text:
        raise ValueError(f"vramlab.{name} has no docstring")
    return re.sub(r"([*_\[\]<>|$#])", r"\\\1", text)
