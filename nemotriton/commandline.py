"""What all command lines have in common: a refusal is one line on stderr that names what was typed.

Exit codes: 0 done; 1 it ran, and something in it is wrong (an answer failed, a check found a fault,
a rank broke off); 2 refused, with what to change; 130 stopped by Ctrl-C.
"""

import ast
import os
import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from nemotriton.console import Console
from nemotriton.errors import NemotritonError, RankError, nearest

COMMANDS = {
    "generate": "answer prompts, files, batches, or talk",
    "serve": "OpenAI's HTTP interface",
    "quantize": "write an NVFP4 or FP8 copy of a bf16 checkpoint",
    "audit": "what a checkpoint lacks, what fits, which op is wrong, env for a bug report",
    "autotune": "compile and tune the Triton kernels",
}
HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
_ClickException: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

Flags = Mapping[str, tuple[str, str]]  # keyword -> the option, and the one that switches it off
_FLAGS: ContextVar[Flags | None] = ContextVar("flags", default=None)
_OTHER_NAMES = {
    "thinking_token_budget": ("think_budget",),
    "stop_token_ids": ("stop_token",),
    "max_context": ("max_context", "context", "tokens"),
    "max_requests": ("max_requests", "requests"),
}
_NONE = re.compile(r",? or None\b[^.;:)]*")  # an option is left out instead
_VALUE = (
    r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\[[^\]]*\]|\([^)]*\)|\{[^}]*\}"""
    r"|\d{1,3}(?:,\d{3})+|[^\s,;:()]*[^\s,;:().]"
)
_LONG = 60  # characters of a value in a message


class UsageError(NemotritonError):
    """The command line, or a file it names, asks for something that makes no sense.

    Its message speaks of options already; that of any other error speaks Python.
    """


# ---- refusals as they were typed ---------------------------------------------------------------


def as_typed(text: str, but: Collection[str] = ()) -> str:
    """A message with the running command's options in place of Python's keywords:
    `max_tokens=0` -> `--max-tokens 0`. As it is where no command runs. but: keywords that stay."""
    flags = {name: flag for name, flag in (_FLAGS.get() or {}).items() if name not in but}
    if not flags:
        return text
    names = "|".join(sorted(map(re.escape, flags), key=len, reverse=True))
    valued = re.compile(rf"(?<![\w/.'\"=-])({names}) ?= ?({_VALUE})")
    bare = re.compile(rf"(?<![\w/.'\"=-])({names})(?![\w/='\"-])")
    text = valued.sub(lambda found: _spelled(flags[found[1]], found[2]), _NONE.sub("", text))
    return bare.sub(lambda found: _bare(found[1], flags), text)


def _bare(name: str, flags: Flags) -> str:
    """A keyword without a value, if it cannot be an English word."""
    return flags[name][0] if "_" in name or name in ("tp", "ep") else name


def _spelled(flag: tuple[str, str], value: str) -> str:
    on, off = flag
    try:
        found = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        found = value  # `4,096`
    if isinstance(found, bool):
        return on if found else off or f"no {on}"
    if isinstance(found, dict):  # of `impl`
        found = [v if k == "*" else f"{k}={v}" for k, v in found.items()]
    each = found if isinstance(found, list | tuple) else [found]
    if not all(isinstance(one, str) for one in each) or (isinstance(found, str) and value == found):
        return f"{on} {value}"
    short = [one if len(one) <= _LONG else one[:_LONG] + "..." for one in each]
    return " ".join([on, *(shlex.quote(one) if _odd(one) else one for one in short)])


def _odd(text: str) -> bool:
    return not text or any(c.isspace() or not c.isprintable() for c in text)


def _flags_of(parameters: Sequence[Any]) -> dict[str, tuple[str, str]]:
    """Options by the keywords that mean the same."""
    found: dict[str, tuple[str, str]] = {}
    for parameter in parameters:
        on = next((name for name in parameter.opts if name.startswith("--")), None)
        if on is not None:
            off = next(iter(parameter.secondary_opts), "")
            found[on[2:].replace("-", "_")] = (on, off)
    for name, options in _OTHER_NAMES.items():
        same = next((option for option in options if option in found), None)
        if same is not None:
            found[name] = found[same]
    return found


# ---- refusals of the parser --------------------------------------------------------------------


def misuse(problem: Any) -> str:
    """One line for what the parser of a command line refuses."""
    kind, context = type(problem).__name__, getattr(problem, "ctx", None)
    parameter = getattr(problem, "param", None)
    if kind == "NoSuchOption":
        return _no_such_option(problem.option_name, context)
    if kind == "MissingParameter" and parameter is not None:
        about = (getattr(parameter, "help", None) or "it is needed").rstrip(".")
        return f"{_label(parameter)} is missing: {about[0].lower()}{about[1:]}. See --help."
    if kind == "BadParameter" and parameter is not None:
        return _bad_value(problem, _label(parameter))
    message = problem.format_message().rstrip(".")
    extra = re.fullmatch(r"Got unexpected extra arguments? ?(?:\(s\) )?\((.*)\)", message)
    if extra and context is not None:
        own = [_label(p) for p in context.command.params if p.param_type_name == "argument"]
        taken = f"only {' '.join(own)} stands" if own else "nothing stands"
        return f"unexpected argument {extra[1]}: {taken} without an option here. See --help."
    unknown = re.fullmatch(r"No such command '(.*?)'.*", message, re.DOTALL)
    if unknown and context is not None:
        return _no_such("command", unknown[1], list(context.command.commands))
    return re.sub(r"^Option '(\S+)'", r"\1", message) + ". See --help."


def _no_such_option(name: str, context: Any) -> str:
    if context is None:
        return f"there is no option {name}. See --help."
    commands = getattr(context.command, "commands", None)
    if commands is not None:
        return f"there is no option {name} before a command: give one of {', '.join(commands)}."
    own = [o for p in context.command.params for o in (*p.opts, *p.secondary_opts)]
    near = nearest(name[2:], [o[2:] for o in own if o.startswith("--")])
    hint = f": did you mean --{near}?" if near else "."
    return f"there is no option {name}{hint} See --help."


def _no_such(what: str, name: str, known: Sequence[str]) -> str:
    near = nearest(name, known)
    hint = f": did you mean {near}?" if near else "."
    return f"there is no {what} {name}{hint} There are: {', '.join(known) or 'none'}."


def need_known(what: str, name: str, known: Sequence[str]) -> None:
    """UsageError for a name that is none of the `known` ones, with the nearest of them."""
    if name not in known:
        raise UsageError(_no_such(what, name, known))


def _label(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name).strip("{}[]").upper()
    return max(parameter.opts, key=len)


def _bad_value(problem: Any, label: str) -> str:
    """`--max-tokens many: give a whole number.`"""
    errors = getattr(problem.__cause__, "errors", None)
    if errors is None:
        return f"{label}: {problem.message.rstrip('.')}. See --help."
    first = errors()[0]
    limits = first.get("ctx") or {}
    remedy = {
        "int_parsing": "a whole number",
        "int_from_float": "a whole number",
        "float_parsing": "a number",
        "greater_than_equal": f"a number >= {limits.get('ge')}",
        "less_than_equal": f"a number <= {limits.get('le')}",
    }.get(first["type"])
    told = f"give {remedy}" if remedy else str(first["msg"])
    return f"{label} {first['input']}: {told}."


# ---- commands ----------------------------------------------------------------------------------


class _OneLine:
    """`main` of a command or a group, whose parser's refusals are one line and exit code 2."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
    ) -> Any:
        run: Any = super().main  # type: ignore[misc]
        if not standalone_mode:
            return run(args, prog_name, complete_var, False)
        try:
            code = run(args, prog_name, complete_var, False)
        except _ClickException as problem:
            if type(problem).__name__ == "NoArgsIsHelpError":
                print(problem.ctx.get_help(), file=sys.stderr)
            else:
                Console().error(misuse(problem))
            sys.exit(2)
        sys.exit(code if isinstance(code, int) else 0)


class Command(_OneLine, TyperCommand):  # type: ignore[misc]
    """A command whose errors on purpose are one line, and whose --synthetic needs no number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        seeds = [p for p in self.params if p.name == "synthetic" and not getattr(p, "is_flag", 0)]
        if seeds:
            following = [*args[1:], ""]
            args = [
                "--synthetic=0" if arg == "--synthetic" and not after.isdecimal() else arg
                for arg, after in zip(args, following)
            ]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        token = _FLAGS.set(_flags_of(self.params))
        try:
            return super().invoke(ctx)
        except NemotritonError as problem:
            said = str(problem)
            Console().error(said if isinstance(problem, UsageError) else as_typed(said))
            raise typer.Exit(1 if isinstance(problem, RankError) else 2) from None
        except KeyboardInterrupt:
            Console().error("interrupted")
            raise typer.Exit(130) from None
        except BrokenPipeError:  # whoever read stdout has gone: nobody is left to tell
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except OSError as problem:  # a path that was given, such as one to write to
            if problem.filename is None:
                raise
            Console().error(f"{problem.filename}: {problem.strerror}. Give another path.")
            raise typer.Exit(2) from None
        finally:
            _FLAGS.reset(token)


class Group(_OneLine, TyperGroup):  # type: ignore[misc]
    """Several commands under one name."""


class Program(typer.Typer):
    """An application of one `Command`, or of several in a `Group`."""

    def __init__(self, about: str | None = None) -> None:
        super().__init__(
            cls=Group,
            add_completion=False,
            no_args_is_help=True,
            pretty_exceptions_enable=False,
            context_settings=HELP,
            help=about,
        )

    def command(  # type: ignore[override]
        self, name: str | None = None, *, context_settings: Mapping[str, Any] | None = None
    ) -> Any:
        settings = HELP | dict(context_settings or {})
        return super().command(name, cls=Command, context_settings=settings)
