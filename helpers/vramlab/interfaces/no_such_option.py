"""What the command line says of a Trainer's argument that is no option."""

from typing import Any

from ..recipe.arguments import CLASSIFIED
from ..recipe.sharding import OF_ENGINE
from .recipe_options import OPTIONS

# What the command line says of a Trainer's argument that is no option.
WHY_NOT = dict.fromkeys(
    CLASSIFIED["neutral"],
    "what {} answers does not depend on it, so leave it out",
)
WHY_NOT |= {
    name: f"no recipe models it: {CLASSIFIED['reasons'][name]}" for name in CLASSIFIED["refused"]
}
TILED = (
    "no Trainer's argument puts DeepSpeed's TiledMLP into a model: put it there yourself, and "
    "simulate(model=…) runs it"
)
TILED_LOSS = (
    "DeepSpeed's tiled loss is called by code of your own: SFTTrainer computes its loss in "
    "parts by itself, and --use-liger-kernel keeps no logits either"
)
EXPERTS = (
    "with expert parallel a rank holds the tokens that the router sends it, which no recipe "
    "says: WatchCallback() in its Trainer measures it, and --engine fsdp or deepspeed divides "
    "experts as it does all weights"
)
# What other programs name so.
WHY_NOT |= {
    "tiled_mlp": TILED,
    "tiled_loss": TILED_LOSS,
    "tiled_logits": TILED_LOSS,
    "load_in_4bit": "say --quantization nf4, to plan --method qlora",
    "load_in_8bit": "say --quantization int8",
}
WHY_NOT |= dict.fromkeys(("expert_parallel", "expert_parallel_size", "ep_size"), EXPERTS)
COMPILED = (
    "plan orders recipes by formulas, which do not know what Inductor keeps. Without it, "
    "vramlab plan MODEL --json > plan.json; then vramlab simulate plan.json --gpu CARD "
    "--torch-compile says what its answer takes compiled, and torch_compile=True in its "
    "TrainingArguments trains so"
)
TWO_CARDS = "diff compares bytes, on whatever card; simulate says of each whether it fits"
MESH = (
    "plan tries no meshes of ranks: vramlab simulate MODEL {} N --world-size M --stage 3 "
    "--engine {} says what a rank of one holds"
)
SAY = {
    name: f"--{o.replace('_', '-')}" for o, (_, knob) in OPTIONS.items() for name in knob.elsewhere
}
SAY |= {"context_parallel_size": "--cp-size", "sequence_parallel_size": "--sp-size"}


def instead(error: Any, command: str | None) -> str:
    """Return a sentence on the option that click's NoSuchOption names.

    "" unless a Trainer's arguments have it.
    """
    option = getattr(error, "option_name", "")
    # click's BadOptionUsage, as of an option without its value, has a name and no context.
    if not (option and error.ctx):
        return ""
    name = option.lstrip("-").replace("-", "_")
    known = {o for each in error.ctx.command.params for o in each.opts}
    why = (command == "evaluate" and CLASSIFIED["evaluation"].get(name)) or WHY_NOT.get(
        name,
        "",
    ).format(command)
    # An option of the same meaning is the better answer than why there is none of this name.
    why = f"say {SAY[name]}" if SAY.get(name) in known else why
    if name == "torch_compile" and command == "plan":
        why = COMPILED
    if name == "gpu" and command == "diff":
        why = TWO_CARDS
    # `plan` chooses much of a recipe itself.
    if not why and name in OPTIONS and command in ("plan", "generate"):
        others = "simulate does" if name == "torch_compile" else "predict and simulate do"
        why = f"{command} does not take it, {others}"
        if command == "plan" and name in ("cp_size", "sp_size", "dp_replicate_size"):
            why = MESH.format(option, OF_ENGINE[name])
    return f"There is no option {option}: {why}." if why and command else ""
