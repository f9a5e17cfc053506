"""`python -m nemotriton`: which commands there are; `python -m nemotriton NAME ...` runs one."""

import runpy
import sys

from nemotriton.commandline import COMMANDS, UsageError, need_known
from nemotriton.console import Console


def main() -> None:
    """Run the command that stands first, or list all."""
    given = sys.argv[1:]
    if not given or given[0] in ("-h", "--help"):
        for name, does in COMMANDS.items():
            print(f"python -m nemotriton.{name:<10} {does}")
        print("--help of each lists its options.")
        return
    try:
        need_known("command", given[0], list(COMMANDS))
    except UsageError as problem:
        Console().error(str(problem))
        sys.exit(2)
    del sys.argv[1]
    runpy.run_module(f"nemotriton.{given[0]}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
