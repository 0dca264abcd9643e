"""`vramlab mcp`: commands as tools of the Model Context Protocol, over standard streams.

A tool takes what its command takes and answers what `--json` prints, by the same schemas. Each call
runs the command in a process of its own: no shell, nothing is written, nothing is downloaded, and
only files that the call names are read.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from .. import __version__
from .command_output import DOES_NOT_FIT, WRONG
from .schema import schema_of

TOOLS = ("plan", "predict", "simulate", "explain", "diff", "models", "gpus")
# Options that write, ask the network, or change what is printed.
NO_OPTIONS = frozenset({"as_json", "download", "pretrained", "write", "help"})
INSTRUCTIONS = (
    "GPU memory of training and fine-tuning, without a GPU: `plan` says which recipe fits a card, "
    "`simulate` runs the real training step on fake tensors (seconds, to the byte), `predict` is "
    "a formula (milliseconds), `explain` reads an out-of-memory message. Sizes are bytes."
)
# Arguments that are no options: what they are called here, and what they are.
WORDS: dict[str, dict[str, str]] = {
    "explain": {
        "message": "The out-of-memory message, as it was printed.",
        "recipe": "What ran, as predict takes it: 'gpt2 --batch-size 8 --precision bf16'.",
    },
}


def input_schema(name: str, command: Any) -> dict[str, Any]:
    """Return the JSON Schema of what a tool takes: its command's arguments and options."""
    properties: dict[str, Any] = {}
    required = []
    for parameter in command.params:
        if parameter.name in NO_OPTIONS:
            continue
        # explain's words are one list on a command line; a tool's arguments need names.
        if parameter.name == "words":
            for word, text in WORDS[name].items():
                properties[word] = {"type": "string", "description": text}
            continue
        properties[parameter.name] = _property(parameter)
        if parameter.required:
            required.append(parameter.name)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        # A misspelt argument is then an error and no answer to another question.
        "additionalProperties": False,
    }


def _property(parameter: Any) -> dict[str, Any]:
    kind: dict[str, Any] = {"type": "string"}
    if getattr(parameter, "is_flag", False):
        kind = {"type": "boolean"}
    elif isinstance(parameter.default, int | float):
        kind = {"type": ["number", "string"]}  # "8k" tokens, "24GiB"
    if getattr(parameter, "multiple", False):
        kind = {"type": "array", "items": {"type": "string"}}
    text = getattr(parameter, "help", None)
    if text:
        kind["description"] = text
    return kind


def output_schema(name: str) -> dict[str, Any]:
    """Return the schema of `vramlab NAME --json`, said to be an object as the protocol wants it."""
    return {"type": "object", **schema_of(name)}


def command_line(name: str, command: Any, given: dict[str, Any]) -> list[str]:
    """Return the words of a tool's command.

    Values cannot become options: each stands behind its own `=` or behind `--`. Raises ValueError
    for an argument that the tool has not.
    """
    taken = input_schema(name, command)["properties"]
    unknown = sorted(given.keys() - taken.keys())
    if unknown:
        raise ValueError(f"{name} takes no {', '.join(unknown)}; it takes {', '.join(taken)}.")
    words = [name, "--json"]
    behind: list[str] = []
    for parameter in command.params:
        if parameter.name == "words":
            behind += _spoken(given)
        elif given.get(parameter.name) is not None:
            value = given[parameter.name]
            if parameter.param_type_name == "argument":
                behind.append(str(value))
            else:
                words += _option(parameter, value)
    # Behind -- click takes no word for an option, so a model's name that begins with a dash stays a
    # name.
    return [*words, "--", *behind]


def _spoken(given: dict[str, Any]) -> list[str]:
    """Return explain's words: the message alone, the recipe alone, or both."""
    message = given.get("message")
    said = [] if message is None else [message]
    # Split as a shell would, but no shell is started.
    return said + shlex.split(given.get("recipe") or "")


def _option(parameter: Any, value: Any) -> Iterator[str]:
    flag = parameter.opts[0]
    if isinstance(value, bool) and getattr(parameter, "is_flag", False):
        if value:
            yield flag
        elif parameter.secondary_opts:
            yield parameter.secondary_opts[0]
        return
    values = value if isinstance(value, list) else [value]
    for each in values:
        # With = a value that begins with a dash is not taken for the next option.
        yield f"{flag}={each}"


def server(commands: dict[str, Any]) -> Any:
    """Return the server of the official SDK, with a tool for each of TOOLS.

    Args:
        commands: the command line's, by name.
    """
    import mcp_types as types
    from mcp.server.lowlevel import Server

    reads_only = types.ToolAnnotations(
        read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
    )
    tools = [
        types.Tool(
            name=name,
            description=commands[name].help,
            input_schema=input_schema(name, commands[name]),
            output_schema=output_schema(name),
            annotations=reads_only,
        )
        for name in TOOLS
    ]

    async def listed(context: Any, asked: Any) -> Any:
        return types.ListToolsResult(tools=tools)

    async def called(context: Any, asked: Any) -> Any:
        def said(text: str, **more: Any) -> Any:
            content: list[Any] = [types.TextContent(type="text", text=text)]
            return types.CallToolResult(content=content, **more)

        if asked.name not in TOOLS:
            return said(f"no tool {asked.name}: there are {', '.join(TOOLS)}.", is_error=True)
        try:
            words = command_line(asked.name, commands[asked.name], asked.arguments or {})
        except ValueError as error:
            return said(str(error), is_error=True)
        status, out, err = await answer(words)
        # "It does not fit" is an answer of the tool, not a failure of it.
        if status not in (0, DOES_NOT_FIT):
            why = err.strip() or f"vramlab ended with status {status}."
            return said(why, is_error=True)
        # As text too, for clients that show no structured content.
        return said(out, structured_content=json.loads(out))

    return Server(
        "vramlab",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=listed,
        on_call_tool=called,
    )


async def answer(words: list[str]) -> tuple[int, str, str]:
    """Return the exit status of `vramlab WORDS`, what it printed, and its errors."""
    import anyio

    # A process of its own: torch's memory goes with it, and a crash of one call leaves the server
    # up.
    command = [sys.executable, "-m", "vramlab", *words]
    try:
        # Standard input is the protocol's, so the command must not read from it.
        done = await anyio.run_process(command, check=False, stdin=subprocess.DEVNULL)
    except (OSError, ValueError) as error:  # a zero byte in an argument, no memory for a process
        return WRONG, "", str(error)
    out, err = (part.decode("utf-8", errors="replace") for part in (done.stdout, done.stderr))
    return done.returncode, out, err


def serve(commands: dict[str, Any]) -> None:
    """Answer on standard input and output until the client goes."""
    import anyio
    from mcp.server.stdio import stdio_server

    async def run() -> None:
        made = server(commands)
        async with stdio_server() as (reads, writes):
            await made.run(reads, writes, made.create_initialization_options())

    anyio.run(run)
