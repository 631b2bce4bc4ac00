"""`phasor chat`: a conversation in the terminal, or one turn per line of a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from phasor.cli.generate import add_model_options, read_model
from phasor.cli.options import (
    ON_HUB,
    add_extension_fields,
    add_fields,
    chosen_adapters,
    declare_options,
    given_fields,
)
from phasor.cli.streams import check_argument, decode_text, print_text
from phasor.config.generation import OPTIONS, GenerationConfig
from phasor.config.schema import unknown

if TYPE_CHECKING:
    from phasor.generation import ChatSession

CHAT_OPTIONS = {
    "--system TEXT": "what the model is told before the conversation",
    "--template FILE": "a chat template (Jinja), where the folder has none or another one is wanted",
}
HELP = """/system TEXT  begin again, with another system turn; without TEXT, without one
/reset        begin again
/save FILE    write the conversation as a line of JSON
/help         this text
/exit         end, as Ctrl-D does
Ctrl-C stops a reply. A line that begins with a space is a turn, and no command."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Talk with a model by the chat template of its folder. In a terminal a line is a turn, /help lists commands, "
        "and Ctrl-C stops a reply. From a pipe every line is a turn, and the replies are printed. An encoder-decoder "
        "reads the conversation with its encoder, as plain text where its folder has no template."
    )
    parser.add_argument("folder", help=f"a model folder, a run, or {ON_HUB}")
    declare_options(parser, CHAT_OPTIONS)
    add_model_options(parser)
    add_fields(parser, "how tokens are chosen", GenerationConfig, helps=OPTIONS)
    add_extension_fields(parser)


def run(given: argparse.Namespace) -> None:
    from phasor.checkpoints.chat_template import ChatTemplate
    from phasor.generation import ChatSession

    fields = given_fields(given, GenerationConfig)
    system = None if given.system is None else check_argument(given.system, "--system")
    adapter = chosen_adapters(given.adapter)
    model = read_model(given.folder, given, None, given.checkpoint, given.part, adapter=adapter, swaps=True)
    template = None
    if given.template is not None:
        folder = Path(given.template).parent if model.origin is None else model.origin.folder
        template = ChatTemplate.read(folder, given.template)
    elif ChatTemplate.of(model) is None and model.config.shape != "encoder-decoder":
        raise ValueError(
            f"{given.folder} has no chat template, which says how a conversation is written: give one with --template "
            "FILE, or continue a text with phasor generate"
        )
    conversation = ChatSession(model, system=system, template=template, **fields)
    if sys.stdin is None:
        raise ValueError("standard input is closed, and the turns would be read from there")
    if sys.stdin.isatty():
        chat_loop(conversation)
    else:
        answer_lines(conversation)


def answer_lines(conversation: ChatSession) -> None:
    """Reply to every line of standard input; a line without text is none."""
    binary = getattr(sys.stdin, "buffer", None)
    for number, line in enumerate(sys.stdin if binary is None else binary, 1):
        text = line if isinstance(line, str) else decode_text(line, f"standard input, turn {number}")
        if text.strip():
            print_reply(conversation, text.rstrip("\r\n"))


def print_reply(conversation: ChatSession, text: str) -> None:
    """Print the reply to a turn as it comes."""
    pieces = conversation.stream(text)
    try:
        for piece in pieces:
            print_text(piece, end="")
    finally:
        print(flush=True)


def chat_loop(conversation: ChatSession) -> None:
    """Read turns and commands from a terminal until it is closed."""
    with suppress(ImportError):  # lines that can be edited, with those before
        import readline  # noqa: F401
    print("phasor: a line is a turn; /help lists commands", file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\nphasor: /exit or Ctrl-D ends", file=sys.stderr)
            continue
        except UnicodeDecodeError as error:
            print(f"phasor: the line is not UTF-8 text: see its byte {error.start}", file=sys.stderr)
            continue
        if line.strip() == "/exit":
            return
        try:
            check_argument(line, "the line")
            if line.startswith("/"):
                run_command(conversation, *line.strip().split(maxsplit=1))
            elif line.strip():
                print_reply(conversation, line.strip())
        except KeyboardInterrupt:
            print("phasor: stopped", file=sys.stderr)
        except (ValueError, OSError) as error:
            print_text(f"phasor: {error}", file=sys.stderr)


def run_command(conversation: ChatSession, command: str, text: str = "") -> None:
    """Do what a line that begins with a slash says."""
    commands: dict[str, Callable[[], object]] = {
        "/help": lambda: print(HELP, file=sys.stderr),
        "/reset": conversation.reset,
        "/save": lambda: conversation.save(Path(text).expanduser() if text else text),
        "/system": lambda: begin_again(conversation, text),
    }
    if command not in commands:
        raise unknown("command", command, [*commands, "/exit"])
    commands[command]()


def begin_again(conversation: ChatSession, system: str) -> None:
    conversation.system = system or None
    conversation.reset()
