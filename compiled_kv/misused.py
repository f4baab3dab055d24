"""How every command refuses what it was given."""

from __future__ import annotations

import click


class Misused(click.ClickException):
    """A wrong command, option, value, file or step, or a command whose extra is missing: one line, exit status 2."""

    exit_code = 2
