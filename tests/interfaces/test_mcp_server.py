"""`vramlab mcp`, asked by the official SDK's own client: it answers as the command line does."""

import json
import os
import sys

import pytest
import typer
from typer.testing import CliRunner
from vramlab.interfaces.cli import app
from vramlab.interfaces.mcp_server import NO_OPTIONS, TOOLS, command_line, input_schema

pytest.importorskip("mcp", reason="vramlab[mcp]")
import anyio
from mcp import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client

COMMANDS = typer.main.get_command(app).commands
MESSAGE = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 14.56 GiB of "
    "which 10.00 MiB is free."
)
ASKED = [
    ("predict", {"model": "gpt2", "batch_size": 4, "seq_len": "1k", "precision": "bf16"}),
    ("plan", {"model": "gpt2", "gpu": "T4", "confirm": False}),
    ("explain", {"message": MESSAGE, "recipe": "gpt2 --batch-size 8"}),
    ("gpus", {"filtered": "T4"}),
]
WRONG = [
    ("predict", {"model": "nothing"}, "no model and no readable file is called so"),
    ("predict", {"model": "gpt2", "write": "x"}, "predict takes no write"),
    ("predict", {"model": "--help"}, "MODEL is '--help'"),
    ("explain", {}, "no out-of-memory message"),
    ("measure", {"model": "gpt2"}, "no tool measure"),
]


async def asked_of_the_server(calls, cwd):
    """The tools that the server lists, and its answer to each call."""
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "vramlab", "mcp"], env=dict(os.environ), cwd=cwd
    )
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        tools = await session.list_tools()
        return tools.tools, [await session.call_tool(name, given) for name, given in calls]


def test_tools_answer_what_the_command_line_prints_and_touch_no_file(tmp_path):
    calls = ASKED + [(name, given) for name, given, _ in WRONG]
    tools, answers = anyio.run(asked_of_the_server, calls, tmp_path)
    assert tuple(tool.name for tool in tools) == TOOLS
    assert all(tool.output_schema["type"] == "object" and tool.description for tool in tools)
    for (name, given), answer in zip(ASKED, answers, strict=False):
        assert not answer.is_error, answer
        words = command_line(name, COMMANDS[name], given)
        printed = CliRunner().invoke(app, words)
        assert printed.exit_code in (0, 1), printed.output
        assert answer.structured_content == json.loads(printed.stdout), name
        assert json.loads(answer.content[0].text) == answer.structured_content
    for (_, _, said), answer in zip(WRONG, answers[len(ASKED) :], strict=True):
        assert answer.is_error and said in answer.content[0].text, answer
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_takes_what_its_command_takes_but_nothing_that_writes_or_asks_the_network(name):
    properties = input_schema(name, COMMANDS[name])["properties"]
    parameters = {parameter.name for parameter in COMMANDS[name].params} - NO_OPTIONS
    assert set(properties) == (parameters - {"words"}) | (
        {"message", "recipe"} if "words" in parameters else set()
    )
    assert not set(properties) & {"write", "download", "pretrained", "folder", "report"}


def test_no_value_becomes_an_option():
    given = {"model": "--version", "gpu": "--write=x", "batch_size": "1 --download"}
    words = command_line("predict", COMMANDS["predict"], given)
    assert words == [
        "predict", "--json", "--batch-size=1 --download", "--gpu=--write=x", "--", "--version"
    ]  # fmt: skip
    flags = {"model": "gpt2", "gradient_checkpointing": True, "expandable_segments": False}
    words = command_line("predict", COMMANDS["predict"], flags)
    assert words == ["predict", "--json", "--gradient-checkpointing", "--", "gpt2"]
    with pytest.raises(ValueError, match="takes no as_json; it takes model, "):
        command_line("predict", COMMANDS["predict"], {"model": "gpt2", "as_json": False})
