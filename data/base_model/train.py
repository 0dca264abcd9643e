"""Train the course's own base model on the source code of Python's standard library.

    python data/base_model/train.py --steps 4000 --folder data/base_model

writes the texts, a byte-level BPE tokenizer, the weights (fp16, safetensors) and the model card,
all from what this machine's Python has installed. Training can be stopped and started again: it
goes on from `--checkpoint`.
"""

import argparse
import hashlib
import json
import math
import platform
import sys
import sysconfig
import time
from pathlib import Path

import safetensors
import tokenizers
import torch
import transformers
from card import compressed, write_card
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 0
START = "<|start|>"  # stands before every file, and is all the model knows at a file's first byte
# Tables, tests and data that are not programs; `pydoc_data` is the second domain, for fine-tuning.
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "__pycache__",
}


def _bucket(name: str, of: int) -> int:
    """A number under `of` that depends on nothing but the name: the split is the same on every
    machine.
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % of


def source_files(folder: Path) -> dict[str, str]:
    """Path inside `folder` -> text, of every program of the standard library, each text once."""
    files, seen = {}, set()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if LEFT_OUT & set(name.parts[:-1]) or str(name).startswith("_sysconfigdata"):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.strip() and text not in seen:
            seen.add(text)
            files[name.as_posix()] = text
    return files


def split_files(files: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What is trained on, and one file of 40 that is never seen, chosen by the hash of its name."""
    held_out = {name: text for name, text in files.items() if _bucket(name, 40) == 25}
    return {name: text for name, text in files.items() if name not in held_out}, held_out


def documentation() -> tuple[dict[str, str], dict[str, str]]:
    """The second domain: the language reference that `help()` shows. Training topics, and one of
    eight held out.

    Topics repeat each other's sections: a paragraph is kept where it stands first, held-out topics
    before the others.
    """
    from pydoc_data.topics import topics

    order = sorted(topics, key=lambda name: (_bucket(name, 8) != 0, name))
    seen, train, held_out = set(), {}, {}
    for name in order:
        new = [
            p
            for p in topics[name].strip().split("\n\n")
            if len(p) < 40 or not (p in seen or seen.add(p))
        ]
        text = "\n\n".join(new) + "\n"
        if len(text) > 400:
            (held_out if _bucket(name, 8) == 0 else train)[name] = text
    return train, held_out


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE: 256 bytes and what merges best, so that it can write any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[START],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=START, eos_token=START, pad_token=START
    )


def config(vocab_size: int, hidden: int = 256, layers: int = 4) -> LlamaConfig:
    """A small Llama. Every width is a multiple of 64, the block of bitsandbytes' 4-bit formats."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=64 * round(hidden * 8 / 3 / 64),
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over a twentieth of the steps, then a cosine to a fiftieth of the peak."""
    warm = max(1, steps // 20)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (
        0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
    )


def train(
    model,
    tokens,
    steps,
    batch_size,
    context,
    peak,
    checkpoint: Path | None = None,
    every: int = 100,
    stop_at=None,
) -> dict:
    """`steps` of AdamW under bf16 autocast; returns the last losses (nats per token), minutes and
    tokens read.
    """
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)
    done, minutes, losses, schedule = 0, 0.0, [], []
    if checkpoint and (checkpoint / "progress.json").exists():
        progress = json.loads((checkpoint / "progress.json").read_text())
        done, minutes, losses = progress["step"], progress["minutes"], progress["losses"]
        schedule = progress["schedule"]
        model.load_state_dict(load_file(checkpoint / "model.safetensors"), strict=False)
        moments = load_file(checkpoint / "optimizer.safetensors")
        for i, p in enumerate(matrices + others):
            optimizer.state[p] = {
                key: moments[f"{i}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")
            }
    offsets = torch.arange(context)
    started = time.perf_counter()
    model.train()
    stop_at = stop_at or steps
    if done < stop_at and (not schedule or schedule[-1][1] != steps):
        schedule = [*schedule, [done, steps]]  # from which step on the cosine ended at which
    for step in range(done, stop_at):
        generator = torch.Generator().manual_seed(
            SEED + step
        )  # the batch depends on the step alone
        starts = torch.randint(len(tokens) - context, (batch_size, 1), generator=generator)
        batch = tokens[starts + offsets].long()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses = [*losses[-99:], loss.item()]
        if (step + 1) % every == 0 or step + 1 == stop_at:
            spent = minutes + (time.perf_counter() - started) / 60
            print(
                f"step {step + 1}/{steps}  loss {sum(losses) / len(losses):.3f}  {spent:.1f} min",
                flush=True,
            )
            if checkpoint:
                checkpoint.mkdir(parents=True, exist_ok=True)
                state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
                save_file(state, checkpoint / "model.safetensors")
                moments = {
                    f"{i}.{key}": value
                    for i, p in enumerate(matrices + others)
                    for key, value in optimizer.state[p].items()
                }
                save_file(moments, checkpoint / "optimizer.safetensors")
                progress = {
                    "step": step + 1,
                    "minutes": spent,
                    "losses": losses,
                    "schedule": schedule,
                }
                (checkpoint / "progress.json").write_text(json.dumps(progress))
    spent = minutes + (time.perf_counter() - started) / 60
    return {
        "loss": sum(losses) / len(losses),
        "minutes": spent,
        "tokens": stop_at * batch_size * context,
        "schedule": schedule,
    }


def token_stream(tokenizer, files: dict[str, str]) -> torch.Tensor:
    """All files as one row of tokens, a start token before each, in an order that the names' hashes
    give.
    """
    rows = []
    for name in sorted(files, key=lambda name: (_bucket(name, 1 << 32), name)):
        rows += [tokenizer.bos_token_id, *tokenizer(files[name], verbose=False)["input_ids"]]
    return torch.tensor(rows, dtype=torch.int32)


def save(model, tokenizer, folder: Path) -> None:
    """Weights as fp16 safetensors, config and tokenizer, as `from_pretrained` reads them."""
    model.half().save_pretrained(folder)
    model.float()
    tokenizer.save_pretrained(folder)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--folder", type=Path, default=Path(__file__).parent, help="where model, texts and card go"
    )
    parser.add_argument(
        "--source",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="what to train on",
    )
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument(
        "--stop-at", type=int, help="stop at this step, with the schedule of --steps"
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=2.5e-3)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--checkpoint", type=Path, help="a folder to go on from after a stop")
    parser.add_argument("--hardware", default="CPU", help="for the card")
    args = parser.parse_args(argv)

    files, held_out = split_files(source_files(args.source))
    if not files or not held_out:
        parser.error(
            f"{args.source} holds {len(files)} files to train on and {len(held_out)} to hold "
            f"out; both are needed"
        )
    transformers.utils.logging.disable_progress_bar()
    tokenizer = train_tokenizer(list(files.values()), args.vocabulary)
    tokens = token_stream(tokenizer, files)
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config(len(tokenizer), args.hidden, args.layers))
    steps = args.stop_at or args.steps
    done = train(
        model,
        tokens,
        args.steps,
        args.batch_size,
        args.context,
        args.learning_rate,
        args.checkpoint,
        stop_at=steps,
    )

    folder = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, folder)
    train_topics, held_out_topics = documentation()
    texts = {
        "held_out": held_out,
        "documentation_train": train_topics,
        "documentation_held_out": held_out_topics,
    }
    for name, content in texts.items():
        (folder / f"{name}.json").write_text(
            json.dumps(content, ensure_ascii=False, indent=0) + "\n", encoding="utf-8"
        )

    from vramlab_course.base_model import bits_per_byte

    bits = compressed(list(held_out.values()), before="".join(files.values()))
    loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    bits["this model, file by file"] = bits_per_byte(
        loaded, list(held_out.values()), args.context, tokenizer=tokenizer
    )
    prose = compressed(list(held_out_topics.values()))
    prose["this model, untuned"] = bits_per_byte(
        loaded, list(held_out_topics.values()), args.context, tokenizer=tokenizer
    )
    write_card(
        folder,
        {
            "model": {
                "parameters": sum(p.numel() for p in model.parameters()),
                "layers": args.layers,
                "width": args.hidden,
                "vocabulary": len(tokenizer),
            },
            "python": platform.python_version(),
            "files": len(files),
            "bytes": sum(len(text.encode()) for text in files.values()),
            "tokens": len(tokens),
            "held-out files": len(held_out),
            "held-out bytes": sum(len(text.encode()) for text in held_out.values()),
            "training": {
                "steps": steps,
                "batch size": args.batch_size,
                "context": args.context,
                "tokens read": done["tokens"],
                "learning rate": args.learning_rate,
                "loss": done["loss"],
                "minutes": done["minutes"],
                "schedule": done["schedule"],
            },
            "seed": SEED,
            "hardware": args.hardware,
            "file bytes": (folder / "model.safetensors").stat().st_size,
            "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, "
            f"tokenizers {tokenizers.__version__}, safetensors {safetensors.__version__}",
            "bits per byte": bits,
            "documentation": prose,
            "documentation bytes": [
                sum(len(t.encode()) for t in part.values())
                for part in (train_topics, held_out_topics)
            ],
        },
    )
    print(json.dumps(bits, indent=1))


if __name__ == "__main__":
    sys.exit(main())
