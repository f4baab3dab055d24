"""`python -m compiled_kv`."""

from __future__ import annotations

import sys

try:
    from .cli import main
except ModuleNotFoundError as error:
    sys.exit(f"the command line needs {error.name}: pip install 'compiled_kv[cli]'")

main(prog_name="compiled-kv")
