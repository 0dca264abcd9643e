"""What an out-of-memory message means by itself, and what to do about it."""

import math

from ..hardware.gpu import Gpu, cards_of
from ..report.report import format_bytes, unit_for
from .messages import WORDS, Holder, Message

CARD_REMEDY = (
    "to make room: halve per_device_train_batch_size and double gradient_accumulation_steps, then "
    "gradient_checkpointing=True, use_liger_kernel=True, LoRA or an 8-bit optimizer"
)
HOST_REMEDY = (
    "this is the machine's memory, not the card's: ask for more of it (Slurm's --mem, a "
    "container's "
    "memory limit), or need less: no CPU offload, fewer dataloader workers, weights in bf16, which "
    "all ranks map from one safetensors file, or deepspeed's zero.Init (FSDP's "
    "cpu_ram_efficient_loading spares nothing in transformers 5, issue 43749)"
)
APPLE_REMEDY = (
    "to make room: halve per_device_train_batch_size and double gradient_accumulation_steps, then "
    "gradient_checkpointing=True or LoRA; PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 takes the limit "
    "away, and the machine may swap or stop"
)
# More than the card has: no batch of a few samples makes such a tensor but by a square.
LARGER_REMEDY = (
    "one tensor is larger than the whole card, likely attention's scores, tokens² of each head, or "
    "an image's patches; to make room: attn_implementation='sdpa' or flash attention, which write "
    "no scores, a smaller image (max_pixels), or shorter samples"
)
SOFTMAX_REMEDY = (
    "a softmax asked for it, which is not the loss's: likely attention that writes out its scores, "
    "tokens² of each head ('eager'): attn_implementation='sdpa' or flash attention writes none"
)
OTHERS_REMEDY = "end the other process, or take another card with CUDA_VISIBLE_DEVICES"
FRAGMENTS_REMEDY = "set PYTORCH_ALLOC_CONF=expandable_segments:True"
# PyTorch's own allocator says sizes, so a message without comes from another call of CUDA.
BARE = (
    "CUDA could not give memory and the message has no sizes: a call outside of PyTorch's "
    "allocator failed, as for the context, a library's handle or pinned host memory. While a "
    "model loads that is most often another process that fills the card, or one that died and "
    "left its memory (nvidia-smi lists them)"
)
MORE = (
    "say MODEL with its options, or the script, after the message: then the tensor that asked "
    "and the "
    "three cheapest changes follow, each with its GiB and seconds, as in "
    "vramlab explain MESSAGE train.py"
)
MORE_ELSEWHERE = (
    "say MODEL with its options after the message: then what of that model it is about follows"
)
LITTLE = 0.05  # of what is reserved: fragments that would cure nothing


def sized(n: int) -> str:
    """Return `n` bytes with two digits in the unit that suits them."""
    return format_bytes(n, unit_for(n), 2) if n else "0 bytes"


def missing_of(message: Message) -> int | None:
    """Return the bytes that the request lacks, None where the message does not say."""
    sizes = message.bytes
    if "lack" not in sizes:
        return None
    # Memory that the allocator holds unused may serve the request after all, if it is in one piece.
    in_one_piece = sizes["lack"] - sizes.get("unallocated", 0)
    # Where it would do in one piece, what lacks is the request less what CUDA has free.
    return max(in_one_piece, 0) or max(sizes["lack"], 0)


def of_message(message: Message, alone: bool) -> list[str]:
    """Return the lines on a message; `alone`: with what is missing, a remedy and more to read."""
    lines = _by_kind(message, alone)
    lines += [_holder(one) for one in message.holders]
    # With a recipe the changes follow, each with its bytes, so the general remedies would only
    # repeat.
    if alone:
        lines += _likely_card(message)
    return lines


def more_of(message: Message) -> list[str]:
    """Return the line on what more a message with MODEL tells, none where it tells no more."""
    if message.kind == "other":
        return []
    # The training's tensors would not tell what vLLM or an evaluation asked for.
    return [MORE_ELSEWHERE if message.is_elsewhere else MORE]


def likely_cards(message: Message) -> list[Gpu]:
    """Return the cards that report as much memory as the message's."""
    total = message.bytes.get("total")
    if message.kind != "card" or not total:
        return []
    # Drivers report a total that is typical of a card: a T4 is no round number of GiB.
    return cards_of(total)


def _likely_card(message: Message) -> list[str]:
    names = " or ".join(card.name for card in likely_cards(message))
    has = sized(message.bytes.get("total", 0))
    return [f"a card that has {has}: likely {names} (--gpu)"] if names else []


def _by_kind(message: Message, alone: bool) -> list[str]:
    if message.kind == "bare":
        return [BARE, OTHERS_REMEDY]
    if message.kind == "table":
        return ["nvidia-smi's table: who holds what at that moment, not what asked for more"]
    if message.kind == "host":
        return _of_host(message)
    if message.kind == "share":
        return _of_share(message)
    if message.kind == "other":
        return [message.who, message.remedy]
    lines = _of_card(message, alone)
    if message.who == "Apple":
        return [line.replace(CARD_REMEDY, APPLE_REMEDY) for line in lines]
    if message.frames:
        # What helps a step would not help what asked.
        lines = [line for line in lines if line != CARD_REMEDY]
        lines += [message.who, message.remedy]
    return lines


def _holder(one: Holder) -> str:
    if one.total is None:
        return f"GPU {one.card}: {sized(one.used)} held by {one.name}"
    free = one.total - one.used
    return (
        f"GPU {one.card}, {one.name}: {sized(one.used)} of {sized(one.total)} used, "
        f"{sized(free)} free"
    )


def _of_host(message: Message) -> list[str]:
    sizes = message.bytes
    parts = [f"the machine's memory ran out: {message.who}"]
    if "asked" in sizes:
        parts.append(f"{sized(sizes['asked'])} asked for")
    if "process" in sizes:
        parts.append(f"the process held {sized(sizes['process'])}")
    if "used" in sizes and "total" in sizes:
        parts.append(f"{sized(sizes['used'])} of the machine's {sized(sizes['total'])} were used")
    lines = [", ".join(parts)]
    if "allocated" in sizes:
        lines.append(
            f"the card was not full for that: PyTorch held {sized(sizes['allocated'])} there"
        )
    return [*lines, HOST_REMEDY]


def _of_share(message: Message) -> list[str]:
    said = _asked(message.bytes)
    lines = [message.who + (f": {said}" if said else "")]
    sizes = message.bytes
    # Of PyTorch's own message vLLM holds a part already.
    if "total" in sizes and not message.frames:
        share = math.floor(100 * sizes["free"] / sizes["total"]) / 100
        lines.append(f"what is free is {share:.2f} of the card: no larger share starts there")
    if "rest" in sizes:
        sign = "−" if sizes["rest"] < 0 else ""
        lines.append(f"{sign}{sized(abs(sizes['rest']))} were left for it")
    if "room" in message.tokens:
        room = message.tokens["room"]
        lines.append(f"max_model_len={room} is the longest that has room there, by the message")
    found = "vramlab plan MODEL --trainer grpo --use-vllm --gpu CARD finds a share that fits"
    return [*lines, f"{message.remedy}; {found}"]


def _asked(sizes: dict[str, int]) -> str:
    """Return what was asked for, and of what, in a line."""
    words = WORDS["asked"].items()
    return ", ".join(said.format(sized(sizes[name])) for name, said in words if name in sizes)


def _of_card(message: Message, alone: bool) -> list[str]:
    sizes = message.bytes
    lines = [_asked(sizes)]
    for name, words in WORDS["holders"].items():
        if sizes.get(name):
            lines.append(f"{sized(sizes[name])} held by {words}")
    # Windows' driver pages to the host instead of failing, so a process may hold more than the
    # card.
    if sizes.get("allocated", 0) > sizes.get("total", sizes.get("allocated", 0)):
        lines.append(
            "more than the card has: Windows lends it the host's memory, at the speed of PCIe"
        )
    if message.in_softmax:
        lines.append(SOFTMAX_REMEDY)
    if "lack" not in sizes:
        return [*lines, CARD_REMEDY] if alone else lines
    return lines + _verdict(sizes, missing_of(message) or 0, alone)


def _verdict(sizes: dict[str, int], missing: int, alone: bool) -> list[str]:
    lack = sizes["lack"]
    scattered = sizes.get("unallocated", 0)
    held = scattered + sizes.get("allocated", 0)
    lines = []
    others = sizes.get("others", 0)
    # A process that holds under a hundredth of the card, as a desktop does, is not to blame.
    if others >= max(lack, sizes.get("total", 0) // 100) and sizes["free"] < sizes["asked"]:
        text = (
            "another process is on the card: without it the request would have had room "
            "(nvidia-smi lists them)"
        )
        lines += [text, OTHERS_REMEDY]
    remedy = [CARD_REMEDY] if alone else []
    if sizes["asked"] > sizes.get("total", sizes["asked"]):
        remedy = [LARGER_REMEDY]
    # CUDA refused although as much was free by the message's own figures.
    if lack <= 0:
        text = (
            "that much is free: another process held it then, or what is free is not in one piece"
        )
        return [*lines, text, f"{OTHERS_REMEDY}; {FRAGMENTS_REMEDY}"]
    # Even with every free block joined the request would not fit, so no setting of the allocator
    # helps.
    if scattered < lack:
        text = (
            "a real lack: what is free and what is unallocated together are less than it asks for"
        )
        if alone:
            text = (
                f"a real lack: at least {sized(missing)} are missing, even if what is "
                f"unallocated were in one piece"
            )
    # A few percent of free blocks are normal: joining them helps this request and not the next.
    elif scattered < LITTLE * held:
        text = (
            f"a real lack: the tensors fill the card; of it all, only {sized(scattered)} are "
            f"fragments"
        )
    else:
        text = f"fragmentation: {sized(scattered)} would do, but not in one piece"
        return [*lines, f"{text}; {FRAGMENTS_REMEDY}"]
    # What another process took is no lack of this one's.
    return [*(lines or [text]), *remedy]
