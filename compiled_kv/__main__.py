"""`python -m compiled_kv`, and the command `compiled-kv`."""

from __future__ import annotations

import sys


def command_line() -> None:
    try:
        from compiled_kv.cli import main
    except ModuleNotFoundError as error:
        print(f"the command line needs {error.name}: pip install 'compiled_kv[cli]'", file=sys.stderr)
        sys.exit(2)
    main(prog_name="compiled-kv")


if __name__ == "__main__":
    command_line()
