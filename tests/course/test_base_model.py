"""The course's base model: what is stored loads, predicts better than compressors, and can be made
again.
"""

import importlib.util
import json
import lzma
import math
import sys
import zlib

import pytest
import torch
from quick import params
from safetensors import safe_open
from vramlab.base.data import data_path
from vramlab.base.errors import RecipeError
from vramlab.recipe.recipe import LoRA, Quantization, Recipe
from vramlab_course.base_model import (
    base_model_folder,
    bits_per_byte,
    finetuning_texts,
    held_out,
    load_base_model,
    load_base_tokenizer,
)
from vramlab_course.finetuning import adapted

KB = 1000


@pytest.fixture(scope="module")
def model():
    return load_base_model()


@pytest.fixture(scope="module")
def script():
    folder = str(data_path("base_model"))
    sys.path.insert(0, folder)  # where `python train.py` finds what lies beside it
    spec = importlib.util.spec_from_file_location(
        "train_base_model", data_path("base_model", "train.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(folder)
    return module


def test_files_are_small_and_none_is_a_pickle():
    folder = base_model_folder()
    files = [path for path in folder.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 20_000_000
    assert {path.suffix for path in files} <= {".json", ".md", ".py", ".safetensors", ".toml"}
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.float16}  # noqa: SIM118


def test_loads_as_the_usual_llama(model):
    assert type(model).__name__ == "LlamaForCausalLM" and not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    widths = {
        n
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
        for n in module.weight.shape
    }
    assert all(width % 64 == 0 for width in widths)
    assert load_base_model("bfloat16").model.norm.weight.dtype == torch.bfloat16


def test_a_recipe_counts_its_parameters(model):
    recipe = Recipe(str(base_model_folder()), lora=LoRA(target_modules="all-linear"))
    assert recipe.shape.num_parameters == sum(p.numel() for p in model.parameters())


def test_the_tokenizer_gives_every_text_back():
    tokenizer = load_base_tokenizer()
    for text in ("def f(x):\n\treturn x\r\n", "한국어 🙂 \x00", "  a  b\n\n\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert max(tokenizer("x = 1")["input_ids"]) < tokenizer.vocab_size


def test_predicts_held_out_programs_better_than_compressors(model):
    """Against the strongest setting that sees all of the held-out text as one piece, which favours
    the compressor.
    """
    texts = held_out(20 * KB)
    whole = "".join(texts).encode()
    ours = bits_per_byte(model, texts)
    assert ours < 8 * len(lzma.compress(whole, preset=9 | lzma.PRESET_EXTREME)) / len(whole)
    assert ours < 8 * len(zlib.compress(whole, 9)) / len(whole)
    assert ours > 0.5  # less would mean that the files were not held out
    assert bits_per_byte(model, texts[:1]) == bits_per_byte(model, texts[:1])


def test_the_card_says_what_is_there(model):
    card = json.loads((base_model_folder() / "card.json").read_text())
    assert card["model"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert card["held-out bytes"] == sum(len(text.encode()) for text in held_out())
    assert card["file bytes"] == (base_model_folder() / "model.safetensors").stat().st_size
    assert (
        f"{card['bits per byte']['this model, file by file']:.3f}"
        in (base_model_folder() / "README.md").read_text()
    )


@pytest.mark.slow
def test_the_card_says_how_good_it_is(model):
    card = json.loads((base_model_folder() / "card.json").read_text())
    texts = finetuning_texts("held_out")
    assert bits_per_byte(model, texts) == pytest.approx(
        card["documentation"]["this model, untuned"], rel=1e-3
    )


def test_bits_per_byte_is_the_models_own_loss(model):
    """Of a text that fits one window, against transformers' loss."""
    text = held_out(400)[0]
    tokenizer = load_base_tokenizer()
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]])
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    expected = loss * (ids.shape[1] - 1) / math.log(2) / len(text.encode())
    assert bits_per_byte(model, [text]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stride", [1, 7, 16, 32])
def test_every_token_is_predicted_once_whatever_the_stride(model, stride):
    """Against one token at a time: each token's probability given at most the context before it."""
    text = held_out(300)[0]
    tokenizer = load_base_tokenizer()
    tokens = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]
    nats, end = 0.0, 1
    with torch.no_grad():
        while end < len(tokens):
            last = min(len(tokens), max(end + stride, 32))
            window = torch.tensor([tokens[max(0, last - 32) : last]])
            logp = model(input_ids=window).logits[0, :-1].log_softmax(-1)
            picked = logp.gather(1, window[0, 1:, None])[:, 0]
            nats -= picked[-(last - end) :].sum().item()
            end = last
    assert bits_per_byte(model, [text], context=32, stride=stride) == pytest.approx(
        nats / math.log(2) / len(text.encode()), rel=1e-5
    )


def test_less_context_predicts_worse(model):
    texts = held_out(4 * KB)
    assert bits_per_byte(model, texts, context=16) > 1.02 * bits_per_byte(model, texts)


DOUBLE = Quantization("nf4", double=True)


@pytest.mark.parametrize("quantization", params(["nf4", "fp4", DOUBLE], [DOUBLE]))
def test_loads_in_four_bits(model, quantization):
    import bitsandbytes as bnb

    small = load_base_model(quantization=quantization)
    layers = [module for module in small.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert len(layers) == 7 * small.config.num_hidden_layers
    texts = held_out(5 * KB)
    exact, rounded = bits_per_byte(model, texts), bits_per_byte(small, texts)
    assert exact < rounded < 1.25 * exact


def test_texts_of_the_second_domain_do_not_overlap():
    train, held = ("\n\n".join(finetuning_texts(split)) for split in ("train", "held_out"))
    paragraphs = {p for p in held.split("\n\n") if len(p) >= 40}
    assert len(paragraphs) > 50 and not paragraphs & set(train.split("\n\n"))
    assert 200 * KB < len(train.encode()) < 450 * KB
    assert sum(len(text.encode()) for text in finetuning_texts("train", 1000)) == 1000


def test_bad_values_are_refused(model):
    for call in (
        lambda: load_base_model("float8"),
        lambda: load_base_model(quantization="int3"),
        lambda: load_base_model(quantization="int8"),
        lambda: finetuning_texts("test"),
        lambda: bits_per_byte(model, ["x"], stride=0),
    ):
        with pytest.raises(RecipeError):
            call()


def _tiny_source(script, folder):
    """Ten programs, of which one falls to the held-out side by its name."""
    names = (f"m{i}.py" for i in range(10_000))
    held = next(name for name in names if script._bucket(name, 40) == 25)
    for i in range(9):
        (folder / f"module_{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 30)
    (folder / held).write_text("def g(x):\n    return x\n" * 20)
    (folder / "tests").mkdir()
    (folder / "tests" / "test_it.py").write_text("assert False\n")
    return held


def _arguments(source, folder, *more):
    sizes = [
        "--batch-size",
        "1",
        "--context",
        "32",
        "--vocabulary",
        "300",
        "--hidden",
        "64",
        "--layers",
        "1",
    ]
    return ["--source", str(source), "--folder", str(folder), "--steps", "3", *sizes, *more]


@pytest.fixture(scope="module")
def trained(script, tmp_path_factory):
    """A folder with a source and the model that the script has trained on it, and the program that
    it held out.
    """
    folder = tmp_path_factory.mktemp("trained")
    (folder / "source").mkdir()
    held = _tiny_source(script, folder / "source")
    script.main(_arguments(folder / "source", folder / "model"))
    return folder, held


def test_the_script_trains_end_to_end(trained):
    folder, held = trained
    assert list(json.loads((folder / "model" / "held_out.json").read_text())) == [held]
    card = json.loads((folder / "model" / "card.json").read_text())
    assert card["files"] == 9 and card["training"]["steps"] == 3
    assert card["training"]["tokens read"] == 3 * 32
    assert 0 < card["bits per byte"]["this model, file by file"] < 16
    assert "| tokenizer |" in (folder / "model" / "README.md").read_text()


def test_stopped_and_continued_is_the_same_training(script, trained, tmp_path):
    source, saved = trained[0] / "source", str(tmp_path / "checkpoint")
    script.main(_arguments(source, tmp_path / "half", "--checkpoint", saved, "--stop-at", "2"))
    script.main(_arguments(source, tmp_path / "whole", "--checkpoint", saved))
    once, whole = (
        (folder / "model.safetensors").read_bytes()
        for folder in (trained[0] / "model", tmp_path / "whole")
    )
    assert once == whole


def test_the_script_refuses_a_folder_without_programs(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main(_arguments(tmp_path, tmp_path / "model"))
    assert "0 files to train on" in capsys.readouterr().err


def test_a_quantized_base_that_was_evaluated_can_still_be_trained():
    """bitsandbytes repacks evaluated weights on some processors, for a kernel through which no
    gradient comes back.
    """

    ids, gradients = torch.arange(64)[None], []
    for evaluated in (False, True):
        model = load_base_model(quantization="nf4")
        if evaluated:
            bits_per_byte(model, ["def f():\n    return 1\n"])
        torch.manual_seed(0)
        model = adapted(model, r=4).train()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    first, second = gradients
    assert len(first) == 2 * 4 * 7 and all(torch.equal(first[name], second[name]) for name in first)
    assert all(first[name].any() for name in first if "lora_B" in name)
