"""The command line: `python -m compiled_kv COMMAND`, also `compiled-kv`. A command is imported when it is called."""

from __future__ import annotations

from importlib import import_module

import click

COMMANDS = {
    "audit": "compiled_kv.auditor.command:command",
    "demo": "compiled_kv.demo.command:demo",
    "replay": "compiled_kv.replay.command:command",
}


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
            raise click.ClickException(
                f"{cmd_name} needs {error.name}: pip install 'compiled_kv[cli,models]'"
            ) from None
        return command


@click.group(cls=LazyGroup)
@click.version_option(package_name="compiled_kv")
def main() -> None:
    """Paged KV cache metadata that torch.compile and CUDA graphs take whole."""
