"""How far off tools that estimate training memory are, on runs that others measured.

The runs are those of `data/published_runs.json`.

    pip install --no-deps vramcalc fitcheck-llm
    python benchmarks/scoreboard.py             # predict alone for us, seconds
    python benchmarks/scoreboard.py --simulate  # and simulate, minutes

Each tool is asked in its own terms, for the runs that it has an answer for, and held against
`torch.cuda.max_memory_allocated()`; allowances for CUDA's context and fragmentation are left out
where it names them.

- predict, simulate (vramlab): as a user calls them, for the installed transformers;
  `published_runs.py` has `as_run`.
- vramcalc: decoders with full or LoRA training, no quantized bases. 13 of the runs are its own, and
  set two constants.
- fitcheck-llm: LoRA and 4-bit bases; no full training. 71 of the runs are its own: 49 set its
  allowance for context and fragmentation, which is left out here, and 32 of those its copies of
  logits and scores, which are not.
- accelerate estimate-memory: full training with Adam; weights, gradients and states, "for a batch
  size of 1". In bf16 it describes mixed precision; for weights of 16 bits alone it has no answer.
- DeepSpeed's estimate_zero2_model_states_mem_needs on one GPU without offloading: states alone,
  mixed precision alone.
- In 42 runs the script or an older transformers differed (`as_run`), of which no tool is told;
  "plain" leaves them out, "not fitted to" those that set the tool's own constants as well
  (`fitted_runs.py`).

MemTracker (torch.distributed._tools) answers for real steps on fake tensors and takes a minute a
run: `simulate_vs_memtracker.py`.
"""

import argparse
import statistics
from collections.abc import Callable

import fitcheck
import vramcalc
from accelerate.commands.estimate import estimate_training_usage
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from fitted_runs import set_constants_of, stored
from vramlab import predict, simulate
from vramlab.report.report import MiB, text_table
from vramlab_course.published import Run, runs


def by_vramcalc(run: Run) -> int | None:
    """vramcalc's peak, without bases in 4 bits, and of 8-bit optimizers the states' number."""
    r = run.recipe
    if r.quantization:
        return None
    return vramcalc.estimate(
        r.shape.config,
        mode="train",
        dtype={"fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}[r.precision.partition("-")[0]],
        precision="amp" if r.precision.endswith("mixed") else "pure",
        batch=r.batch_size,
        seq_len=r.seq_len,
        grad_checkpoint=r.gradient_checkpointing,
        attn_impl=r.attn_implementation,
        lora_rank=r.lora.r if r.lora else None,
        optimizer="adamw",
        # Its allowance for the context, which the allocator's peak does not hold.
        overhead_gb=0,
    ).total


def by_fitcheck(run: Run) -> int | None:
    """fitcheck's total without its allowance for context and fragmentation.

    It answers for adapters only.
    """
    r = run.recipe
    s = run.recipe.shape
    if not r.lora:
        return None
    model = fitcheck.ModelConfig(
        name=s.name,
        num_params=s.num_parameters,
        hidden_size=s.hidden_size,
        num_layers=s.num_layers,
        num_attention_heads=s.num_heads,
        num_kv_heads=s.num_kv_heads,
        intermediate_size=s.intermediate_size,
        vocab_size=s.vocab_size,
        head_dim=s.head_dim,
        tie_word_embeddings=s.tied,
    )
    training = fitcheck.TrainingConfig(
        precision=r.precision.partition("-")[0],
        quantization=r.quantization.quant_type if r.quantization else "none",
        double_quant=bool(r.quantization and r.quantization.double),
        optimizer="adam8bit" if "8bit" in r.optim else "adamw",
        batch_size=r.batch_size,
        seq_len=r.seq_len,
        lora_rank=r.lora.r,
        lora_targets=list(r.lora.target_modules),
        grad_checkpoint=r.gradient_checkpointing,
        flash_attn=r.attn_implementation != "eager",
    )
    report = fitcheck.estimate(model, training, fitcheck.get_gpu(vram_mib=48 * 1024))
    return int((report.total_mib - report.overhead_mib) * MiB)


def by_accelerate(run: Run) -> int | None:
    """The largest of its four figures for Adam; its 16-bit figures are those of mixed precision."""
    r = run.recipe
    dtype = {"fp32": "float32", "fp16-mixed": "float16", "bf16-mixed": "bfloat16"}.get(r.precision)
    if r.lora or not dtype:
        return None
    # It takes the bytes of the fp32 weights.
    return max(estimate_training_usage(4 * r.shape.num_parameters, dtype).values())


def by_deepspeed(run: Run) -> int | None:
    """Model states on one GPU: weights of 16 bits and their fp32 masters (mixed precision)."""
    r = run.recipe
    if r.lora or not r.precision.endswith("mixed"):
        return None
    # It returns host memory first, then the GPU's.
    return int(estimate_zero2_model_states_mem_needs(r.shape.num_parameters, cpu_offload=False)[1])


TOOLS: dict[str, Callable[[Run], int | None]] = {
    "vramlab predict": lambda run: predict(run.recipe, gpu=run.gpu).peak.total,
    "vramcalc": by_vramcalc,
    "fitcheck-llm": by_fitcheck,
    "accelerate estimate-memory": by_accelerate,
    "DeepSpeed's ZeRO-2 estimator": by_deepspeed,
}


def main(simulated: bool) -> None:
    """Print a line for each tool.

    It has all runs that the tool answers, the plain ones, and of these those that it saw first
    here.
    """
    tools = dict(TOOLS)
    if simulated:
        tools["vramlab simulate"] = lambda run: simulate(run.recipe, gpu=run.gpu).peak.total
    three = ("mean", "median", "worst")
    rows = [("tool", "runs", *three, "plain", *three, "not fitted to", *three)]
    facts = stored()
    for tool, ask in tools.items():
        found = []
        plain = []
        unseen = []
        for run, fitted in zip(runs(), set_constants_of(tool, facts), strict=True):
            said = ask(run)
            if said is None:
                continue
            error = abs(said / run.allocated - 1)
            found.append(error)
            if run.as_run:
                continue
            plain.append(error)
            if not fitted:
                unseen.append(error)
        rows.append((tool, *figures(found), *figures(plain), *figures(unseen)))
    print(text_table(rows))


def figures(errors: list[float]) -> tuple[str, ...]:
    """How many there are, mean, median and worst."""
    if not errors:
        return "0", "", "", ""
    return str(len(errors)), *(
        f"{f(errors):.2%}" for f in (statistics.mean, statistics.median, max)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulate", action="store_true", help="ask simulate too")
    main(parser.parse_args().simulate)
