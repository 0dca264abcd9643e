"""A script is read line by line: each line is in the recipe, moves no memory, or is named; nothing
is executed.
"""

import json
import time

import pytest
from typer.testing import CliRunner
from vramlab import Rollouts, explain, predict
from vramlab.base.errors import RecipeError, VramLabError
from vramlab.interfaces.cli import app
from vramlab.interfaces.script import recipe_of_script
from vramlab.recipe.shapes import read_shape

BASE = """
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, \
DataCollatorForLanguageModeling
from transformers import Trainer, TrainerCallback, TrainingArguments
# imports

MODEL = "llama-3.2-1b"
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
# model
data = load_dataset("json", data_files="train.jsonl", split="train")


def tokenize(rows):
    return tokenizer(rows["text"], truncation=True, max_length=256)


data = data.map(tokenize, batched=True)
bs = 4
args = TrainingArguments("out", per_device_train_batch_size=bs, bf16=True, learning_rate=2e-5)
# args
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=collator)
# trainer
trainer.train()
trainer.save_model("final")
# after
"""
LORA = "model = get_peft_model(model, LoraConfig(r=16))"
SFT = [
    (
        "import Trainer, TrainerCallback, TrainingArguments",
        "import AutoModel\nfrom trl import SFTConfig, SFTTrainer",
    )
]
SFT += [
    ("Trainer(model=model", "SFTTrainer(model=model"),
    ('TrainingArguments("out"', 'SFTConfig("out", max_length=256'),
]
LOAD = "from_pretrained(MODEL, dtype=torch.float32)"
# TRL loads a model by its name, here in 4 bits and with adapters.
NAMED = [*SFT, ("SFTTrainer(model=model", "SFTTrainer(model=MODEL")]
NAMED += [(f"model = AutoModelForCausalLM.{LOAD}\n", "")]
NF4 = "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', "
NF4 += "bnb_4bit_compute_dtype=torch.bfloat16)"
SFT_LORA = [("args=args,", "args=args, peft_config=LoraConfig(r=16),")]


def at(place, text):
    """Put lines in one of the base script's places."""
    return [(f"# {place}", text)]


def said(text):
    """Add an argument to the Trainer's arguments."""
    return [("bf16=True", f"bf16=True, {text}")]


def loaded(text):
    """Load the model with other arguments."""
    return [(LOAD, f"from_pretrained(MODEL, {text})")]


def recipe_of(tmp_path, changes=(), text=BASE):
    """Recipe and notes of the base script with `changes`, pairs of old and new text."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    path = tmp_path / "train.py"
    path.write_text(text)
    return recipe_of_script(path)


PEFT = "model = get_peft_model(model, {}(task_type='CAUSAL_LM'))"
SUBCLASS = (
    "class Mine(Trainer):\n    def compute_loss(self, model, inputs, **more):\n        return 0"
)
ROWS = """class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows
    def __getitem__(self, index):
        return {'input_ids': torch.tensor(self.rows[index])}"""
FIELDS = {  # what is read: changes, and the recipe's fields
    "batch": (said("gradient_accumulation_steps=3"), {"gradient_accumulation_steps": 3}),
    "assigned again": ([("bs = 4", "bs = 1; bs = 64")], {"batch_size": 64}),
    "computed": ([("bs = 4", "bs = 2 * 4 - 5")], {"batch_size": 3}),
    "a branch that runs": (
        [("bs = 4", "FAST = True\nbs = 4\nif FAST:\n    bs = 9")],
        {"batch_size": 9},
    ),
    "a branch that does not": (
        [("bs = 4", "FAST = False\nif FAST:\n    bs = 9\nelse:\n    bs = 5")],
        {"batch_size": 5},
    ),
    "optimizer": (said("optim='adafactor'"), {"optim": "adafactor"}),
    "length": ([("max_length=256", "max_length=512")], {"seq_len": 512}),
    "checkpointing": (said("gradient_checkpointing=True"), {"gradient_checkpointing": True}),
    "method": (
        at("model", "model.gradient_checkpointing_enable()"),
        {"gradient_checkpointing": True},
    ),
    "new name": (
        at("model", "model.activation_checkpointing_enable()"),
        {"gradient_checkpointing": True},
    ),
    "dtype": (loaded("dtype=torch.bfloat16"), {"dtype": "bfloat16"}),
    "dtype by name": (
        [
            *loaded("dtype=getattr(torch, NAME)"),
            ("bs = 4", "bs = 4\nassert bs"),
            *at("imports", "NAME = 'bfloat16'"),
        ],
        {"dtype": "bfloat16"},
    ),
    "dtype='auto'": (loaded("dtype='auto'"), {"dtype": "bfloat16"}),
    "no dtype": ([(LOAD, "from_pretrained(MODEL)")], {"dtype": "bfloat16"}),
    "published in fp16": (
        [("llama-3.2-1b", "pythia-410m"), (LOAD, "from_pretrained(MODEL)"), *at("model", LORA)],
        {"dtype": "float16"},
    ),
    "old dtype": (loaded("torch_dtype='bfloat16'"), {"dtype": "bfloat16"}),
    "bfloat16()": (at("model", "model = model.bfloat16()"), {"dtype": "bfloat16"}),
    "to(dtype)": (at("model", "model.to(torch.bfloat16)"), {"dtype": "bfloat16"}),
    "to(dtype=)": (
        at("model", "model = model.to('cuda', dtype=torch.bfloat16)"),
        {"dtype": "bfloat16"},
    ),
    "float()": (
        [*loaded("dtype=torch.bfloat16"), *at("model", "model.float()")],
        {"dtype": "float32", "batch_size": 4},
    ),
    "attention": (loaded("attn_implementation='eager'"), {"attn_implementation": "eager"}),
    "LoRA": (at("model", LORA), {"lora.r": 16}),
    "LoRA's cast": (
        at("model", LORA[:-1] + ", autocast_adapter_dtype=False)"),
        {"lora.autocast_adapter_dtype": False},
    ),
    "4 bits": (
        [
            *loaded(
                "quantization_config=BitsAndBytesConfig(load_in_4bit=True, "
                "bnb_4bit_quant_type='nf4')"
            ),
            *at("model", LORA),
        ],
        {"quantization.quant_type": "nf4", "quantization.prepare": False},
    ),
    "8 bits": (
        [*loaded("quantization_config=BitsAndBytesConfig(load_in_8bit=True)"), *at("model", LORA)],
        {"quantization.quant_type": "int8", "quantization.prepare": False},
    ),
    "kw": (
        [
            (
                'TrainingArguments("out"',
                'kw = {"optim": "sgd"}\nargs = TrainingArguments("out", **kw',
            )
        ],
        {"optim": "sgd"},
    ),
    "dict()": (
        [
            (
                'TrainingArguments("out"',
                'kw = dict(optim="sgd")\nargs = TrainingArguments("out", **kw',
            )
        ],
        {"optim": "sgd"},
    ),
    "set afterwards": (at("args", "args.per_device_train_batch_size = 64"), {"batch_size": 64}),
    "setattr": (
        at("args", "setattr(args, 'gradient_accumulation_steps', 2)"),
        {"gradient_accumulation_steps": 2},
    ),
    "Liger": (said("use_liger_kernel=True"), {"use_liger_kernel": True}),
    "Liger's patch": (
        at(
            "imports",
            "from liger_kernel.transformers import "
            "apply_liger_kernel_to_llama\napply_liger_kernel_to_llama()",
        ),
        {"use_liger_kernel": True},
    ),
    "Liger's class": (
        [
            ("AutoModelForCausalLM.from", "AutoLigerKernelForCausalLM.from"),
            *at("imports", "from liger_kernel.transformers import AutoLigerKernelForCausalLM"),
        ],
        {"use_liger_kernel": True},
    ),
    "TF32": (
        [*at("imports", "torch.backends.cuda.matmul.allow_tf32 = True"), ("bf16=True, ", "")],
        {"precision": "tf32"},
    ),
    "SFT": (SFT, {"trainer": "sft", "seq_len": 256, "gradient_checkpointing": True}),
    "SFT, plain arguments": (
        [
            SFT[0],
            SFT[1],
            ("SFTConfig, SFTTrainer", "SFTTrainer\nfrom transformers import TrainingArguments"),
        ],
        {"trainer": "sft", "gradient_checkpointing": False, "seq_len": 1024},
    ),
    "SFT's adapters": (
        [*SFT, ("args=args,", "args=args, peft_config=LoraConfig(r=4),")],
        {"lora.r": 4},
    ),
    "SFT's bits": (
        [*NAMED, ("args=args,", f"args=args, quantization_config={NF4},"), *SFT_LORA],
        {"quantization.quant_type": "nf4", "weights_dtype": "float32"},
    ),
    "bits among what SFT loads with": (
        [
            *NAMED,
            *said(f"model_init_kwargs={{'dtype': 'bfloat16', 'quantization_config': {NF4}}}"),
            *SFT_LORA,
        ],
        {"quantization.quant_type": "nf4", "dtype": "bfloat16"},
    ),
    "VeRA": (at("model", PEFT.format("VeraConfig")), {"peft.peft_type": "VERA"}),
    "IA³": (at("model", PEFT.format("IA3Config")), {"peft.peft_type": "IA3"}),
    "AdaLoRA": (
        at("model", "c = AdaLoraConfig(total_step=9)\nmodel = get_peft_model(model, c)"),
        {"peft.peft_type": "ADALORA", "peft.arguments": {"total_step": 9}},
    ),
    "prompt tuning": (
        at("model", "model = get_peft_model(model, PromptTuningConfig(num_virtual_tokens=8))"),
        {"peft.peft_type": "PROMPT_TUNING", "peft.arguments": {"num_virtual_tokens": 8}},
    ),
    "LoRA's variants": (
        at("model", LORA.replace("r=16", "init_lora_weights='pissa', r=16")),
        {"lora": None, "peft.arguments": {"init_lora_weights": "pissa", "r": 16}},
    ),
    "padding": (
        [("mlm=False)", "mlm=False, pad_to_multiple_of=512)")],
        {"pad_to_multiple_of": 512},
    ),
    "student, not teacher": (
        [
            ('MODEL = "llama-3.2-1b"', 'MODEL = "llama-3.2-1b"\nSTUDENT = "qwen2.5-0.5b"'),
            ("model = Auto", "unused = 1\nmodel = Auto"),
            (LOAD, "from_pretrained(STUDENT)"),
        ],
        {"name": "qwen2.5-0.5b"},
    ),
    "in a function": (
        [
            ("model = Auto", "def load(name):\n    return Auto"),
            (LOAD, "from_pretrained(name, dtype=torch.bfloat16)"),
            ("model=model", "model=load(MODEL)"),
        ],
        {"dtype": "bfloat16"},
    ),
}
NOTED = {  # what is listed: changes, and words of the note
    "embeddings": (
        at("model", "model.resize_token_embeddings(len(tokenizer))"),
        "resize_token_embeddings",
    ),
    "device_map": (loaded("device_map='auto'"), "device_map='auto'"),
    "optimizers": (
        [("args=args,", "args=args, optimizers=(make(), None),")],
        "optimizers=(make(), None)",
    ),
    "unknown argument": (said("foo=3"), "foo=3`, which TrainingArguments does not have"),
    "old argument": (
        said("group_by_length=True"),
        "group_by_length=True`, which TrainingArguments does not have",
    ),
    "unread value": (said("optim=best()"), "optim=best()`, whose value only running it would tell"),
    "a huge constant": (said("optim='a' * 10**9 * 20"), "whose value only running it would tell"),
    "changed dictionary": (
        [("bs = 4", "c = {'bs': 4}\nc['bs'] = 8"), ("size=bs", "size=c['bs']")],
        "c['bs']",
    ),
    "loop": ([("bs = 4", "for bs in (1, 2):\n    pass")], "per_device_train_batch_size=bs"),
    "augmented": ([("bs = 4", "bs = 4\nbs *= 2")], "per_device_train_batch_size=bs"),
    "unsure branch": (
        [("bs = 4", "bs = 4\nif ask():\n    bs = 8")],
        "per_device_train_batch_size=bs",
    ),
    "unsure method": (
        at("model", "if ask:\n    model.gradient_checkpointing_enable()"),
        "gradient_checkpointing_enable",
    ),
    "attribute": (
        at("args", "args.gradient_checkpointing = True"),
        "args.gradient_checkpointing = True",
    ),
    "too late": (
        at("trainer", "args.per_device_train_batch_size = 64"),
        "args.per_device_train_batch_size",
    ),
    "vars": (at("args", "vars(args)['per_device_train_batch_size'] = 64"), "vars(args)"),
    "__dict__": (at("args", "args.__dict__['per_device_train_batch_size'] = 64"), "__dict__"),
    "__setattr__": (at("args", "object.__setattr__(args, 'optim', 'sgd')"), "__setattr__"),
    "global": (
        [("bs = 4", "bs = 4\ndef f():\n    global bs\n    bs = 64\nf()")],
        "per_device_train_batch_size=bs",
    ),
    "deleted": (at("model", "del model.lm_head"), "del model.lm_head"),
    "environ.update": (
        at("imports", "import os\nos.environ.update({'ACCELERATE_USE_FSDP': '1'})"),
        "ACCELERATE",
    ),
    "putenv": (at("imports", "import os\nos.putenv('ACCELERATE_USE_FSDP', '1')"), "ACCELERATE"),
    "moved": (at("model", "x = torch.tensor([0] * 10**9).cuda()"), ".cuda()"),
    "watched": (at("model", "import wandb\nwandb.watch(model, log='all')"), "wandb.watch"),
    "setattr of a name": (at("args", "setattr(args, name, 2)"), "setattr(args, name, 2)"),
    "Liger's parts": (
        at(
            "imports",
            "from liger_kernel.transformers import *\napply_liger_kernel_to_llama(rope=False)",
        ),
        "rope=False",
    ),
    "another's Liger": (
        at(
            "imports",
            "from liger_kernel.transformers import "
            "apply_liger_kernel_to_qwen2\napply_liger_kernel_to_qwen2()",
        ),
        "Liger's kernels for qwen2",
    ),
    "teacher": (
        at("model", "teacher = AutoModelForCausalLM.from_pretrained('gpt2-xl')"),
        "teacher = ",
    ),
    "copy": (at("model", "import copy\nreference = copy.deepcopy(model)"), "copy.deepcopy(model)"),
    "compile": (at("trainer", "trainer.model = torch.compile(model)"), "torch.compile(model)"),
    "kernel switch": (
        at("imports", "torch.backends.cuda.enable_flash_sdp(False)"),
        "enable_flash_sdp",
    ),
    "default dtype": (
        at("imports", "torch.set_default_dtype(torch.bfloat16)"),
        "set_default_dtype",
    ),
    "configuration": (at("model", "model.config.attention_dropout = 0.1"), "attention_dropout"),
    "layer": (at("model", "model.lm_head = torch.nn.Linear(2048, 9)"), "model.lm_head"),
    "weight": (at("model", "for p in model.parameters():\n    p.data = p.data.half()"), "p.data"),
    "patched class": (
        at("imports", "import transformers\ntransformers.Trainer.training_step = step"),
        "training_step",
    ),
    "collator": ([("data_collator=collator", "data_collator=pack")], "data_collator=pack"),
    "loss": ([("args=args,", "args=args, compute_loss_func=focal,")], "compute_loss_func=focal"),
    "something on the card": (at("model", "x = torch.zeros(10**9, device='cuda')"), "torch.zeros"),
    "exec": (at("model", "exec(open('more.py').read())"), "exec("),
    "environment": (
        at("imports", "import os\nos.environ['ACCELERATE_MIXED_PRECISION'] = 'no'"),
        "ACCELERATE",
    ),
    "adapters' cast": ([*at("model", LORA + "\nmodel.to(torch.bfloat16)")], "a cast of adapters"),
    "input grads": (
        at("model", "model.enable_input_require_grads()"),
        "enable_input_require_grads",
    ),
    "no length": ([(", max_length=256", "")], "512 are taken"),
    "a module that patches": (
        at("imports", "import my_patches"),
        "which is run for what it changes",
    ),
    "a name that nobody reads": (
        at("imports", "from .patches import done"),
        "which is run for what it changes",
    ),
    "a method handed over": (
        at("model", "import threading\nthreading.Thread(target=model.half).start()"),
        "Thread",
    ),
    "a callback's model": (
        at(
            "args",
            "class Half(TrainerCallback):\n    def on_train_begin(self, *a, model=None, **k):\n  "
            "      model.half()",
        ),
        "model.half()",
    ),
    "map of a method": (
        at("model", "list(map(torch.nn.Module.half, [model]))"),
        "torch.nn.Module.half",
    ),
    "map of a caller": (
        at("model", "import operator as o\n[*map(o.methodcaller('half'), [model])]"),
        "methodcaller",
    ),
    "sorted by a method": (
        at("model", "sorted([model], key=torch.nn.Module.half)"),
        "torch.nn.Module.half",
    ),
    "a bound method": (at("model", "next(iter(model.half, None))"), "model.half"),
    "data that change the model": (
        [("return tokenizer(", "model.half()\n    return tokenizer(")],
        "without line 17: `model.half()`",
    ),
    "data that set the model": (
        [("return tokenizer(", "model.lm_head = None\n    return tokenizer(")],
        "model.lm_head = None",
    ),
    "data by a lambda": (
        [("data.map(tokenize,", "data.map(lambda r: model.half() and r).map(tokenize,")],
        "model.half()",
    ),
    "data that get the model": (
        [("data.map(tokenize,", "data.map(encode, fn_kwargs={'by': model}).map(tokenize,")],
        "fn_kwargs={'by': model}",
    ),
    "metrics that change the arguments": (
        [
            ("args=args,", "args=args, compute_metrics=score,"),
            *at("args", "def score(p):\n    args.optim = 'sgd'"),
        ],
        "args.optim = 'sgd'",
    ),
    "a loader's decorator": (
        [
            *at("imports", "from my_code import halved"),
            ("model = Auto", "@halved\ndef load():\n    return Auto"),
            ("model=model", "model=load()"),
        ],
        "`halved`, a decorator that is not read",
    ),
    "a loader's own decorator": (
        [
            *at("imports", "def halved(f):\n    return lambda: f().half()"),
            ("model = Auto", "@halved\ndef load():\n    return Auto"),
            ("model=model", "model=load()"),
        ],
        "`halved`, a decorator that is not read",
    ),
    "a Trainer's decorator": (
        [
            *at("imports", "from my_code import fused"),
            *at("args", "@fused(2)\nclass Mine(Trainer):\n    pass"),
            ("= Trainer(", "= Mine("),
        ],
        "`fused(2)`, a decorator that is not read",
    ),
    "a callback of others": (
        [
            *at("imports", "from my_code import HalfCallback"),
            ("args=args,", "args=args, callbacks=[HalfCallback()],"),
        ],
        "HalfCallback",
    ),
    "a callback of nobody": (
        [("args=args,", "args=args, callbacks=[HalfCallback],")],
        "callbacks=[HalfCallback]",
    ),
    "an added callback": (
        at("trainer", "trainer.add_callback(HalfCallback)"),
        "trainer.add_callback(HalfCallback)",
    ),
    "a callback's base": (
        [
            *at("imports", "from my_code import Half"),
            *at("args", "class Mine(Half):\n    pass"),
            ("args=args,", "args=args, callbacks=[Mine()],"),
        ],
        "`Half`, a class that is not read",
    ),
    "another's model class": (
        [
            *at("imports", "from my_code import SparseForCausalLM"),
            ("AutoModelForCausalLM.from", "SparseForCausalLM.from"),
        ],
        "of my_code.SparseForCausalLM, which is not read",
    ),
    "another's arguments": (
        at("imports", "from my_code import TrainingArguments"),
        "of my_code.TrainingArguments",
    ),
    "overridden option": (
        [("bs = 4", "class C:\n    bs = 4\nc = C()\nc.bs = 8"), ("size=bs", "size=c.bs")],
        "per_device_train_batch_size=c.bs",
    ),
}
REFUSED = {  # changes, and words of the sentence
    "added adapter": (at("model", "model.add_adapter(LoraConfig())"), "add_adapter"),
    "loaded adapter": (
        at("model", "model = PeftModel.from_pretrained(model, 'mine')"),
        "in a way that no recipe says",
    ),
    "another's adapters": (
        at("model", "model = get_peft_model(model, MyConfig())"),
        "is no configuration of PEFT's",
    ),
    "adapters for use": (
        at("model", LORA.replace("r=16", "inference_mode=True")),
        "loaded to be used",
    ),
    "AdaLoRA without steps": (
        at("model", PEFT.format("AdaLoraConfig")),
        "PEFT refuses it: AdaLoRA",
    ),
    "EVA": (at("model", LORA.replace("r=16", "init_lora_weights='eva'")), "with rho=1 they stay"),
    "freezing": (
        at("model", "for p in model.model.parameters():\n    p.requires_grad = False"),
        "requires_grad",
    ),
    "requires_grad_": (at("model", "model.model.requires_grad_(False)"), "requires_grad_"),
    "8 bits, short": (loaded("load_in_8bit=True"), "load_in_8bit"),
    "GPTQ": (loaded("quantization_config=GPTQConfig(bits=4)"), "in a way that no recipe says"),
    "AWQ": (loaded("quantization_config=AwqConfig(bits=4)"), "in a way that no recipe says"),
    "subclass": (
        [*at("args", SUBCLASS), ("= Trainer(", "= Mine(")],
        "replaces what Mine does in a step",
    ),
    "another method": (
        [*at("args", "class Mine(Trainer):\n    compute_loss = focal"), ("= Trainer(", "= Mine(")],
        "replaces what Mine does in a step",
    ),
    "two bases": (
        [*at("args", "class Mine(Trainer, Fused):\n    pass"), ("= Trainer(", "= Mine(")],
        "is a second class that Mine is made from",
    ),
    "model class": (
        [
            *at("imports", "class MineForCausalLM(AutoModelForCausalLM):\n    pass"),
            ("AutoModelForCausalLM.from", "MineForCausalLM.from"),
        ],
        "is of a class of its own",
    ),
    "PPO": (
        [
            ("= Trainer(", "= PPOTrainer("),
            *at("imports", "from trl import PPOConfig, PPOTrainer"),
        ],
        "is a trainer that no recipe models",
    ),
    "CPO's arguments": (
        [('TrainingArguments("', 'CPOConfig("')],
        "is of a trainer that no recipe models",
    ),
    "two": (at("trainer", "other = Trainer(model=model, args=args)"), "second Trainer"),
    "Lightning": (at("imports", "import pytorch_lightning as pl"), "Trainer is not transformers'"),
    "Unsloth": (
        [
            ("import torch\n", "import torch\nfrom unsloth import FastLanguageModel\n"),
            (
                "model = Auto",
                "model, tokenizer = FastLanguageModel.from_pretrained(MODEL, "
                "load_in_4bit=True)\nother = Auto",
            ),
        ],
        "Unsloth replaces",
    ),
    "Unsloth's import": (
        at("imports", "import unsloth\nloads = dict(model_name='gpt2', r=8, max_seq_length=64)"),
        "`vramlab predict gpt2 --trainer sft --precision bf16-mixed --gradient-checkpointing "
        "--quantization nf4 --seq-len 64 --batch-size 4 --lora-r 8` (on a card without bf16, as "
        "a T4, end it with --trainer transformers --precision fp16-mixed)",
    ),
    "unread arguments": ([("args=args,", "args=parse(),")], "makes the Trainer's arguments"),
    "arguments of the command line": (
        [
            (
                "args = Tr",
                "args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
                "unused = Tr",
            )
        ],
        "arguments",
    ),
    "unread **": ([('TrainingArguments("out"', 'TrainingArguments("out", **more()')], "more()"),
    "unread model": ([("model=model", "model=build()")], "how the model is loaded"),
    "two models": (
        at("model", "if ask:\n    model = get_peft_model(model, LoraConfig())"),
        "the model",
    ),
    "no head": ([("AutoModelForCausalLM.from", "AutoModel.from")], "in a way that no recipe says"),
    "custom loop": ([("trainer = Trainer(", "trainer = dict(")], "none of Trainer, Seq2SeqTrainer"),
    "four lines": (
        at("model", "one(model)\ntwo(model)\nthree(model)\nfour(model)"),
        "is one of 4 lines",
    ),
}
HARMLESS = {
    "print": at("model", "print(model)\nprint('x' * 3)"),
    "logging": at(
        "imports", "import logging\nlogger = logging.getLogger(__name__)\nlogger.info('%d', 3)"
    ),
    "seed": at("imports", "from transformers import set_seed\nset_seed(42)\ntorch.manual_seed(1)"),
    "wandb": at(
        "imports", "import os, wandb\nos.environ['WANDB_PROJECT'] = 'x'\nwandb.init(project='x')"
    ),
    "environment": at("imports", "import os\nos.environ.setdefault('WANDB_DISABLED', 'true')"),
    "padding token": at(
        "model", "tokenizer.pad_token = tokenizer.eos_token\ntokenizer.padding_side = 'right'"
    ),
    "use_cache": at("model", "model.config.use_cache = False\nmodel.config.pretraining_tp = 1"),
    "to the card": at("model", "model.to('cuda')\nmodel = model.cuda()"),
    "count": at("model", "print(sum(p.numel() for p in model.parameters() if p.requires_grad))"),
    "unpacked": at(
        "model", "for _, p in model.named_parameters():\n    print(p.data_ptr(), p.requires_grad)"
    ),
    "schedule": said(
        "num_train_epochs=3, warmup_steps=10, logging_steps=1, save_strategy='epoch', "
        "report_to='wandb'"
    ),
    "seed of arguments": said("seed=ask(), output_dir=str(ask())"),
    "metrics": [
        ("args=args,", "args=args, compute_metrics=score,"),
        *at("args", "def score(p):\n    return {'a': p.predictions.argmax(-1).mean()}"),
    ],
    "split": at(
        "model",
        "parts = load_dataset('x').train_test_split(test_size=0.1)\nprint(parts['train'][0])",
    ),
    "lambda": [
        (
            "data.map(tokenize,",
            "data.filter(lambda row: len(row['text'].strip()) > 3).map(tokenize,",
        )
    ],
    "argparse": [
        *at(
            "imports",
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('--bs', type=int, "
            "default=4)",
        ),
        ("bs = 4", "asked = p.parse_args()"),
        ("size=bs", "size=asked.bs"),
    ],
    "evaluation": at("trainer", "print(trainer.evaluate())\nmodel.train()"),
    "callback": [
        ("args=args,", "args=args, callbacks=[Stop()],"),
        *at(
            "args",
            "class Stop(TrainerCallback):\n    def on_log(self, args, state, *more):\n        "
            "print(state)",
        ),
    ],
    "afterwards": at(
        "after", "merged = model.merge_and_unload()\nmerged.half().save_pretrained('m')"
    ),
    "pipeline afterwards": at("after", "print(pipeline('text-generation', model=model)('hello'))"),
    "GPU queries": at(
        "model", "print(torch.cuda.get_device_name(0), torch.cuda.max_memory_allocated() / 2**30)"
    ),
    "token": at(
        "imports", "from huggingface_hub import login\nimport os\nlogin(os.environ.get('HF_TOKEN'))"
    ),
    "main": [("trainer.train()", "if __name__ == '__main__':\n    trainer.train()")],
    "libraries": at(
        "imports", "import numpy as np, bitsandbytes as bnb, torch.nn as nn, email.message"
    ),
    "helpers of its own": at("imports", "from my_code import greeting\nprint(greeting)"),
    "list": at(
        "model",
        "names = []\nnames.append('a')\nnames = sorted(set(names))\nprint(', "
        "'.join(names).upper())",
    ),
    "saved configuration": at(
        "args", "import json\nopen('a.json', 'w').write(json.dumps(args.to_dict()))"
    ),
    "logging subclass": [
        *at("args", "class Mine(Trainer):\n    def log(self, logs, *more):\n        print(logs)"),
        ("= Trainer(", "= Mine("),
    ],
    "dataset class": at("model", ROWS),
    "decorators": at(
        "imports",
        "import functools\nfrom dataclasses import dataclass\n@dataclass\nclass Asked:\n    "
        "rank: int = 3\n"
        "    @property\n    def twice(self):\n        return 2 * "
        "self.rank\n@torch.no_grad()\n@functools.cache\n"
        "def f():\n    pass",
    ),
    "own decorator": [
        *at("imports", "def timed(f):\n    return f"),
        ("def tokenize", "@timed\ndef tokenize"),
    ],
    "functions over parameters": at(
        "model", "print(sum(map(torch.numel, filter(None, model.parameters()))))"
    ),
    "callbacks of libraries": [
        *at(
            "imports",
            "from transformers import EarlyStoppingCallback\nfrom vramlab import WatchCallback",
        ),
        ("args=args,", "args=args, callbacks=[EarlyStoppingCallback(3), WatchCallback],"),
    ],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    recipe, notes = recipe_of(tmp_path_factory.mktemp("base"))
    assert (recipe.name, recipe.batch_size, recipe.seq_len) == ("llama-3.2-1b", 4, 256)
    assert recipe.precision == "bf16-mixed" and notes == []
    return recipe


@pytest.mark.parametrize("case", FIELDS)
def test_what_is_read(case, base, tmp_path):
    changes, fields = FIELDS[case]
    recipe, notes = recipe_of(tmp_path, changes)
    for field, value in fields.items():
        part = recipe
        for name in field.split("."):
            part = getattr(part, name)
        assert part == value
    assert notes == [] and (recipe != base or case == "float()")


@pytest.mark.parametrize("case", NOTED)
def test_what_is_listed(case, base, tmp_path):
    changes, words = NOTED[case]
    recipe, notes = recipe_of(tmp_path, changes)
    assert any(words in note for note in notes), notes
    assert len(notes) <= 3 and recipe.name == base.name


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, tmp_path):
    changes, words = REFUSED[case]
    with pytest.raises(RecipeError) as caught:
        recipe_of(tmp_path, changes)
    message = str(caught.value)
    assert words in message and "\n" not in message
    runs = f"vramlab run --gpu NAME -- python {tmp_path}/train.py"
    assert runs in message or "no recipe models" in message


@pytest.mark.parametrize("case", HARMLESS)
def test_what_moves_nothing(case, base, tmp_path):
    assert recipe_of(tmp_path, HARMLESS[case]) == (base, [])


ENDLESS = {
    "text": "bs = 'a' * 10**9 * 20",
    "power": "bs = 9**9**9",
    "shift": "bs = 1 << 10**12",
    "doubled": "\n".join(
        ["b0 = 'aaaaaaaaaa'", *(f"b{i + 1} = b{i} + b{i}" for i in range(60)), "bs = b60"]
    ),
    "tuples": "\n".join(
        ["b0 = 4", *(f"b{i + 1} = (b{i},) * 9 + (b{i}, b{i})" for i in range(39)), "bs = b39"]
    ),
    "choices": "\n".join(
        ["b0 = 4", *(f"b{i + 1} = b{i} if ask else b{i}" for i in range(60)), "bs = b60"]
    ),
    "circle": "def f():\n    return g()\ndef g():\n    return f()\nbs = f()",
    "itself": "if bs:\n    bs = 4",
    "format": "bs = f'{1:>999999999}'",
}


GRPO = """from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer


def length(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


args = GRPOConfig("out", num_generations=4, per_device_train_batch_size=4, beta=0.04,
                  max_completion_length=64, temperature=0.9, epsilon_high=0.28)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=[length],
    args=args,
    train_dataset=load_dataset("trl-lib/tldr", split="train"),
    peft_config=LoraConfig(r=8, target_modules="all-linear"),
)
trainer.train()
"""


def test_a_script_of_grpo_is_read(tmp_path):
    recipe, notes = recipe_of(tmp_path, text=GRPO)
    sampled = Rollouts(4, 256, 64, temperature=0.9, beta=0.04)
    assert (recipe.trainer, recipe.rollouts, recipe.lora.r) == ("grpo", sampled, 8)
    assert notes == ["the tokens of a prompt are not written in it: 256 are taken"]
    said = recipe_of_script(tmp_path / "train.py", given={"prompt": 100})
    assert said[0].seq_len == 164 and said[1] == []
    loads = [("reward_funcs=[length]", "reward_funcs='some/reward-model'")]
    _, notes = recipe_of(tmp_path, loads, text=GRPO)
    assert any("reward_funcs" in note for note in notes)


@pytest.mark.parametrize("case", ENDLESS)
def test_constants_are_computed_within_bounds(case, base, tmp_path):
    begun = time.perf_counter()
    _, notes = recipe_of(tmp_path, [("bs = 4", ENDLESS[case])])
    assert time.perf_counter() - begun < 5
    assert any("per_device_train_batch_size=bs" in note for note in notes) or case == "itself"


def test_a_script_that_is_no_script_is_refused(tmp_path):
    path = tmp_path / "train.py"
    for text in (
        "x = " + "(" * 5000,
        "x = " + "-" * 90_000 + "1",
        "\0",
        "x = " + "1+" * 20_000 + "1",
        "#" * 3_000_000,
    ):
        path.write_text(text)
        with pytest.raises(VramLabError) as caught:
            recipe_of_script(path)
        assert len(str(caught.value)) < 500


def test_a_script_is_never_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe_of(tmp_path, at("imports", "open('was here', 'w')\nimport os; os.mkdir('and here')"))
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


def test_notes_are_in_text_json_and_python(tmp_path, monkeypatch):
    recipe_of(tmp_path, NOTED["embeddings"][0])
    path = tmp_path / "train.py"
    found = explain(path)
    note = "without line 12: `model.resize_token_embeddings(len(tokenizer))`"
    assert found.notes == [note]
    runner = CliRunner()
    assert runner.invoke(app, ["explain", str(path)]).output == f"{found}\n" and str(
        found
    ).endswith(f"note: {note}")
    assert json.loads(runner.invoke(app, ["explain", str(path), "--json"]).output)["notes"] == [
        note
    ]
    monkeypatch.setattr(
        "vramlab.interfaces.explain.report_of", lambda recipe, target: predict(recipe)
    )
    small = f"gpt2 '{path}' --num-layers 1 --seq-len 8"
    both = runner.invoke(app, ["diff", small, f"{small} --batch-size 2"])
    assert both.exit_code == 0 and note in both.stderr
    other = runner.invoke(app, ["explain", "gpt2", str(path), "--seq-len", "32"]).output
    assert other.startswith("predicted: gpt2 · batch 4 · 32 tokens")


def test_a_note_shows_no_control_letters(tmp_path):
    _, notes = recipe_of(tmp_path, at("model", "model.tell('\u202e\u009b31m', '\x1b[31m')"))
    assert "tell(" in notes[0] and notes[0].isprintable()


def test_the_old_name_of_checkpointing_is_read_without_a_warning(tmp_path, recwarn):
    with_it, _ = recipe_of(tmp_path, said("gradient_checkpointing=True"))
    without, _ = recipe_of(tmp_path, [*SFT, *said("gradient_checkpointing=False")])
    assert with_it.gradient_checkpointing and not without.gradient_checkpointing
    assert not [each for each in recwarn if issubclass(each.category, FutureWarning)]


def test_a_dtype_that_nobody_says_is_an_assumption(tmp_path):
    shape = read_shape("llama-3.2-1b").config
    del shape["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    changes = [("llama-3.2-1b", str(tmp_path)), (LOAD, "from_pretrained(MODEL)")]
    recipe, notes = recipe_of(tmp_path, changes)
    assert recipe.weights_dtype == "float32" and "an assumption" in notes[0]


def test_without_a_model_the_sentence_says_where_to_put_it(tmp_path):
    with pytest.raises(RecipeError, match=r"explain MODEL train\.py"):
        recipe_of(tmp_path, [('MODEL = "llama-3.2-1b"', "MODEL = ask()")])
