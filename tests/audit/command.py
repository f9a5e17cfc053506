"""The audits as their command line runs them."""

import json
from typing import Any

from typer.testing import CliRunner

from nemotriton.audit.__main__ import app
from tests.pages import DOCS, indented


def commands() -> list[list[str]]:
    """The commands of docs/audit.md, each its arguments, what is set before it in front."""
    return [
        [*found.variables, *found.args]
        for found in indented(DOCS / "audit.md")
        if found.program == "nemotriton.audit"
    ]


def invoke(*args: str) -> tuple[int, str, str]:
    """Exit code, stdout, and stderr as one line (the error box folds long ones)."""
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, list(args))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def invoke_json(*args: str) -> tuple[int, Any]:
    """Exit code and the object on stdout."""
    code, out, err = invoke(*args, "--json")
    assert out, err
    return code, json.loads(out)
