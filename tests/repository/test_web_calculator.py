"""The calculator in the page: its archive answers on the standard library alone, and in a real browser as here."""

import functools
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlencode

import pytest
import web_calculator
from typer.testing import CliRunner
from vramlab import model_names, predict, read_shape
from vramlab.faces.calculator import CONTROLS, START, recipe_in
from vramlab.faces.cli import app
from vramlab.report.errors import VramLabError

ASK = """
import json, sys
sys.path[:0] = ["helpers", "."]
import bridge
page = json.loads(bridge.page())
asked = json.loads(sys.stdin.read())
answers = [json.loads(bridge.answer(json.dumps(state))) for state in asked]
config = json.loads(bridge.add_config("a b/c", '{"model_type": "qwen3", "hidden_size": 64}'))
print(json.dumps([page, answers, config, sorted({name.partition(".")[0] for name in sys.modules})]))
"""

MODELS = [name for name in model_names() if read_shape(name).layout]
VALUES = CONTROLS | {"model": MODELS}
IS_STATE = """wanted => {
  const state = JSON.parse(document.getElementById("calculator").dataset.state);
  return JSON.stringify(state, Object.keys(state).sort()) === JSON.stringify(JSON.parse(wanted), Object.keys(state).sort());
}"""


def _js(value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def draws(number: int, seed: int) -> list[dict]:
    """Random states of the controls."""
    rng = random.Random(seed)
    return [
        START | {name: rng.choice(values) for name, values in VALUES.items() if values and rng.random() < 0.5}
        for _ in range(number)
    ]


def expected(state: dict) -> dict:
    try:
        recipe = recipe_in(state)
        report = predict(recipe, gpu=state["gpu"])
    except VramLabError as error:
        return {"error": str(error)}
    need = report.process
    return {
        "peak": report.peak.total, "parts": [[name, size] for name, size in report.peak.items() if size],
        "process": [need.low, need.value, need.high], "recipe": str(recipe), "notes": report.notes,
    }  # fmt: skip


def same(found: dict, state: dict) -> None:
    wanted = expected(state)
    assert {name: found.get(name) for name in wanted} == wanted, state


def test_the_archive_answers_as_predict_does_without_any_library(tmp_path):
    web_calculator.write_archive(tmp_path / "vramlab.zip")
    zipfile.ZipFile(tmp_path / "vramlab.zip").extractall(tmp_path)
    states = draws(60, 1)
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ASK], input=json.dumps(states), cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    page, answers, config, modules = json.loads(run.stdout)
    assert not {"torch", "numpy", "transformers", "matplotlib"} & set(modules)
    for answer, state in zip(answers, states, strict=True):
        same(answer, state)
    assert sum("error" in answer for answer in answers) < 50
    assert [control["name"] for control in page["controls"]] == list(CONTROLS)
    assert page["controls"][0]["values"] == MODELS and 40 < len(MODELS) < len(model_names())
    assert "num_hidden_layers" in config["error"]
    assert not (tmp_path.parent / "c").exists() and (tmp_path / "a-b-c" / "config.json").exists()


def test_code_of_an_answer_runs_and_says_the_same(tmp_path):
    sys.path.insert(0, str(web_calculator.ROOT / "site" / "static" / "calculator"))
    import bridge

    state = bridge.BEGIN | {"quantization": "nf4", "double_quant": True}
    answer = json.loads(bridge.answer(json.dumps(state)))
    names: dict = {"print": lambda *_: None}
    exec(answer["code"], names)
    assert predict(names["recipe"]).peak.total == answer["peak"]
    assert {"SFTConfig(", "LoraConfig(", "BitsAndBytesConfig(", "    max_length=2048,"} <= set(
        answer["arguments"].splitlines()
    )
    words = shlex.split(answer["command"].replace("\\\n", " "))
    said = CliRunner().invoke(app, [*words[1:], "--json"])
    assert json.loads(said.stdout)["peak"]["total"] == answer["peak"], said.output


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The page on a server, without the rest of the site."""
    folder = tmp_path_factory.mktemp("page")
    place = shutil.copytree(web_calculator.ROOT / "site" / "static" / "calculator", folder / "calculator")
    web_calculator.write_archive(place / "vramlab.zip")
    shutil.copytree(web_calculator.fetch_pyodide(web_calculator.ROOT / "build"), place / "pyodide")
    (folder / "index.html").write_text(
        '<!doctype html><div id="calculator"></div><script type="module" src="calculator/calculator.js"></script>'
    )
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.slow
def test_a_browser_says_the_same_bytes_for_200_recipes(address):
    """Needs `pip install playwright` and a Chromium, by its path in CHROMIUM where Playwright has none of its own."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=os.environ.get("CHROMIUM"), args=["--no-sandbox"])
        page, wrong = browser.new_page(), []
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(address)
        page.wait_for_selector("#calculator[data-answer]", timeout=120_000)
        begin = json.loads(page.locator("#calculator").get_attribute("data-state"))
        for state in draws(200, 2):
            page.evaluate("address => { location.hash = address }", urlencode({k: _js(v) for k, v in state.items()}))
            wanted = json.dumps(begin | state, sort_keys=True)
            page.wait_for_function(IS_STATE, arg=wanted, timeout=60_000)
            same(json.loads(page.locator("#calculator").get_attribute("data-answer")), state)
        browser.close()
    assert [line for line in wrong if "favicon" not in line and "404" not in line] == []
