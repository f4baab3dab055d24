"""The command line: `python -m compiled_kv COMMAND`, also `compiled-kv`. A command is imported when it is called."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from compiled_kv.misused import Misused

COMMANDS = {
    "audit": "compiled_kv.auditor.command:command",
    "demo": "compiled_kv.demo.command:demo",
    "replay": "compiled_kv.replay.command:command",
}


def missing(command: str, module: str | None) -> str:
    """What is said of a command that cannot import a module."""
    return f"{command} needs {module}: pip install 'compiled_kv[cli,models]'"


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name].split(":")
        try:
            command: click.Command = getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("compiled_kv"):
                raise
            raise Misused(missing(cmd_name, error.name)) from None
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each command with the whole first sentence of its help."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, found.get_short_help_str(limit=1000)) for name, found in commands if found])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return self._in_a_line(super().parse_args, ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        return self._in_a_line(super().invoke, ctx)

    def _in_a_line(self, run: Any, *given: Any) -> Any:
        try:
            return run(*given)
        except click.UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # of click 8.2 on: the help is what is shown
                raise
            message = " ".join(error.format_message().split())
            where = error.ctx.command_path if error.ctx else "compiled-kv"
            raise Misused(f"{message.rstrip('.')} (see {where} --help)") from None


@click.group(cls=LazyGroup)
@click.version_option(package_name="compiled_kv")
def main() -> None:
    """Paged KV cache metadata that torch.compile and CUDA graphs take whole."""
