"""What a log says of the memory that ran out: a card's, or the host's."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from ..base.data import data_path
from ..base.errors import VramLabError
from ..report.report import UNITS, GiB, MiB

WORDS = json.loads(data_path("out_of_memory.json").read_text(encoding="utf-8"))
# Ray, DeepSpeed, Linux and PyTorch on Apple's GPUs divide by powers of 1,024 and print the decimal
# unit's name; vLLM prints the unit of a pair once
SIZES = UNITS | {"bytes": 1, "TiB": 1 << 40, "GB": GiB, "MB": MiB, "KB": 1024, "kB": 1024, "": GiB}
# Times the card: 2**64 bytes are what WSL prints as a process's, and cudaMallocAsync as no limit
NONSENSE = 2
ROUNDING = 3 * GiB // 200  # of a total, what is free and a process, each with two digits


class MessageError(VramLabError, ValueError):
    """Text that is no out-of-memory message."""


@dataclass(frozen=True)
class Holder:
    """A line of nvidia-smi: a card, or a process on one."""

    card: int
    name: str
    used: int
    total: int | None = None  # None for a process


@dataclass
class Message:
    """What a log says.

    `kind` is "card" for a message with sizes, "bare" for one without, "share" for vLLM's about its
    share of a card, "host" where the machine's own memory ran out, "table" for nvidia-smi's alone.
    A card's in vLLM's frames is a "share" too.
    `fields` are those of a recipe that the traceback gives away, and `says` what in it does.
    """

    kind: str
    bytes: dict[str, int] = field(default_factory=dict)
    who: str = ""
    remedy: str = ""
    precision: float = 0.0  # bytes by which the printed request may be off
    holders: list[Holder] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    says: list[str] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)  # of vLLM's: `longest`, `room`
    frames: str = ""  # those in the traceback that are of no step: a name of WORDS["frames"]
    in_softmax: bool = False  # the frame that asked is a softmax, which is not the loss's

    @property
    def is_elsewhere(self) -> bool:
        """Whether something else than a step's forward or backward asked for the memory."""
        return self.kind == "share" or self.frames != ""


def read_message(text: str) -> Message:
    """Return what the last out-of-memory message in `text` says. Raises MessageError.

    `bytes` has them by the names of `WORDS`; besides, `others` is what other processes hold,
    `context` what this one holds outside of PyTorch, and `lack` what the request lacks. Sizes
    are as exact as the message: two digits of their unit.
    """
    # Who printed a line: srun's or a cluster's node, torchrun's rank, Ray's worker.
    text = re.sub(WORDS["prefix"], "", text, flags=re.MULTILINE)
    # Logs break a message over lines, so its patterns are looked for with all white space as one
    # blank.
    line = " ".join(text.split())
    message = _of_card(line) or _of_share(line) or _of_others(line) or _of_host(text)
    holders = _holders(text)
    if message is None and re.search(WORDS["bare"], line):
        message = Message("bare")
    if message is None and holders:
        message = Message("table")
    if message is None:
        rest = (
            "PyTorch's says 'Tried to allocate …' and what is free, vLLM's what its share lacks; "
            "logs of Slurm, Ray, DeepSpeed, a container or Linux say that a process was killed, "
            "and nvidia-smi's table who holds what."
        )
        raise MessageError(f"this is no out-of-memory message: {rest}")
    message.holders = holders
    # Names in the traceback, such as a trainer's class, tell what no message says.
    for trace in WORDS["traces"]:
        if re.search(trace["pattern"], text):
            # The first trace to say a field counts.
            message.fields = {**trace["fields"], **message.fields}
            message.says.append(trace["says"])
    if message.kind == "card":
        _find_frames(message, text)
    return message


def _find_frames(message: Message, text: str) -> None:
    """Put into `message` whose frames of the traceback asked for memory."""
    message.in_softmax = re.search(WORDS["in_softmax"], text) is not None
    for entry in WORDS["frames"]:
        if re.search(entry["pattern"], text):
            message.frames = entry["name"]
            message.who = entry["who"]
            message.remedy = entry["remedy"]
            break
    if message.frames == "vllm":
        message.kind = "share"


def _size(match: re.Match) -> int:
    number, unit = match.groups()
    return int(float(number) * SIZES[unit])


def _of_card(line: str) -> Message | None:
    """Return PyTorch's message on a CUDA, HIP or MPS device, the last of `line`."""
    # A log may hold several messages, as when a script retries; the last is the one that ended it.
    starts = list(re.finditer(WORDS["start"], line, re.IGNORECASE))
    if not starts:
        return None
    said = line[starts[-1].start() :]
    sizes: dict[str, int] = {}
    units: dict[str, str] = {}
    for name, wordings in WORDS["patterns"].items():
        for wording in wordings:
            # Wordings of all of PyTorch's versions; the first that is found counts.
            match = re.search(wording, said, re.IGNORECASE)
            if match and name not in sizes:
                sizes[name] = _size(match)
                units[name] = match.group(2)
    if "asked" not in sizes:
        return None
    # Older messages say what is reserved in total, newer ones what of it is unallocated.
    if "reserved" in sizes:
        reserved = sizes.pop("reserved")
        sizes.setdefault("unallocated", max(reserved - sizes.get("allocated", 0), 0))
    _find_process(said, sizes)
    _complete(sizes)
    unit = units["asked"]
    printed = SIZES[unit] / 200 if unit != "bytes" else 0.0  # half of the second digit
    who = "Apple" if re.match(WORDS["apple"], said) else ""
    return Message("card", sizes, who, precision=printed)


def _of_share(line: str) -> Message | None:
    """Return vLLM's message about its share of a card, which is no error of PyTorch's."""
    for entry in WORDS["share"]:
        if not re.search(entry["pattern"], line):
            continue
        sizes = {}
        for name, pattern in entry["sizes"].items():
            match = re.search(pattern, line)
            if match:
                sizes[name] = _size(match)
        if sizes.keys() >= {"asked", "free"}:
            sizes["lack"] = sizes["asked"] - sizes["free"]
        tokens = {}
        for name, pattern in WORDS["tokens"].items():
            match = re.search(pattern, line)
            if match:
                tokens[name] = int(match.group(1))
        return Message("share", sizes, entry["who"], entry["remedy"], tokens=tokens)
    return None


def _of_others(line: str) -> Message | None:
    """Return a message that sounds like a lack of the card's memory, and says no sizes of it."""
    for entry in WORDS["others"]:
        if re.search(entry["pattern"], line):
            return Message("other", {}, entry["who"], entry["remedy"])
    return None


def _find_process(said: str, sizes: dict[str, int]) -> None:
    """Put into `sizes` what this process has, which NVML may list under a foreign number."""
    total = sizes.get("total", 0)
    for name in ("process", "allowed"):
        if total and sizes.get(name, 0) > NONSENSE * total:
            del sizes[name]
    if "process" not in sizes and "total" in sizes:
        held = sizes.get("allocated", 0) + sizes.get("unallocated", 0)
        listed = [_size(match) for match in re.finditer(WORDS["another"], said)]
        # In a container all have foreign numbers. Ours holds at least what PyTorch says it holds;
        # of several such the least, which is wrong by less than our own context and libraries.
        large = [size for size in listed if held <= size <= total]
        if large:
            sizes["process"] = min(large)


def _complete(sizes: dict[str, int]) -> None:
    """Put into `sizes` what follows from the message's own figures."""
    held = sizes.get("allocated", 0) + sizes.get("unallocated", 0)
    if sizes.keys() >= {"process", "total", "free"}:
        # What the process has on the card and PyTorch does not know: context, kernels, other
        # libraries.
        sizes["context"] = max(sizes["process"] - held, 0)
        others = sizes["total"] - sizes["free"] - sizes["process"]
        sizes["others"] = others if others > ROUNDING else 0
    if "free" in sizes:
        # `allowed` is there where set_per_process_memory_fraction caps the process below what is
        # free.
        most = sizes.get("allowed", held + sizes["free"]) - held
        sizes["lack"] = sizes["asked"] - max(min(sizes["free"], most), 0)
    elif "allowed" in sizes:
        sizes["lack"] = sizes["asked"] + held + sizes.get("foreign", 0) - sizes["allowed"]


def _of_host(text: str) -> Message | None:
    """Return what a log says of the machine's own memory; the most telling words count."""
    for entry in WORDS["host"]:
        if not re.search(entry["pattern"], text, re.MULTILINE):
            continue
        sizes: dict[str, int] = {}
        for name, pattern in entry["sizes"].items():
            matches = list(re.finditer(pattern, text))
            # The last one: logs repeat such lines as memory fills.
            if matches:
                sizes[name] = _size(matches[-1])
        _add_deepspeed(text, sizes)
        return Message("host", sizes, entry["who"])
    return None


def _add_deepspeed(text: str, sizes: dict[str, int]) -> None:
    """Put the last line of DeepSpeed's see_memory_usage into `sizes`.

    The machine's total follows from its percentage.
    """
    patterns = WORDS["deepspeed"]
    for name in ("used", "allocated", "reserved"):
        matches = list(re.finditer(patterns[name], text))
        if matches:
            sizes.setdefault(name, _size(matches[-1]))
    shares = re.findall(patterns["percent"], text)
    if shares and float(shares[-1]):
        # The line says what is used and its percentage, and no total.
        sizes.setdefault("total", int(sizes["used"] / float(shares[-1]) * 100))


def _holders(text: str) -> list[Holder]:
    """Return the cards and the processes of nvidia-smi's table."""
    patterns = WORDS["table"]
    cards: list[Holder] = []
    processes: list[Holder] = []
    last: tuple[int, str] | None = None
    for line in text.splitlines():
        card = re.search(patterns["card"], line)
        memory = re.search(patterns["memory"], line)
        process = re.search(patterns["process"], line)
        if card:
            # A card takes two lines of the table: its name in one, its memory in the next.
            last = int(card.group(1)), card.group(2)
        elif memory and last:
            used, total = memory.groups()
            cards.append(Holder(*last, int(used) * MiB, int(total) * MiB))
            last = None
        elif process and cards:
            number, pid, name, used = process.groups()
            processes.append(Holder(int(number), f"{name} ({pid})", int(used) * MiB))
    return cards + processes
