"""The `octavo` command. Imports nothing but click until a command runs, so that --help and --version are instant."""

from __future__ import annotations

import importlib
import sys

import click

from octavo import __version__

# command -> (module, attribute, one line of help): the module is imported when the command is.
_COMMANDS = {
    "run": ("octavo.cli.run", "run", "Answer one prompt and exit."),
    "chat": ("octavo.cli.chat", "chat", "Talk with a model in the terminal."),
    "serve": ("octavo.cli.serve", "serve", "Serve a model over an OpenAI-compatible API."),
    "cluster": ("octavo.cli.cluster", "cluster", "See to the workers of a running server."),
    "worker": ("octavo.cli.worker", "worker", "Run an engine for a front end elsewhere."),
    "pull": ("octavo.cli.models", "pull", "Download a model into the cache."),
    "models": ("octavo.cli.models", "models", "List the models of the catalogue and the cache."),
    "kv": ("octavo.cli.kv", "kv", "List and clear the KV cache on disk."),
    "simulate": ("octavo.cli.simulate", "simulate", "Simulate engines under a load, on any machine."),
    "calibrate": ("octavo.cli.calibrate", "calibrate", "Measure what steps take here, for the engine and the simulator."),
    "plan": ("octavo.cli.plan", "plan", "Plan memory and machines for a model and a load."),
    "reproduce": ("octavo.cli.reproduce", "reproduce", "Make published figures again and compare."),
    "quantize": ("octavo.cli.quantize", "quantize", "Pack a model anew in fewer bits, as a draft for itself."),
    "doctor": ("octavo.cli.doctor", "doctor", "Measure this machine and check every kernel on it."),
    "explain": ("octavo.cli.explain", "explain", "Say where the time of a running server's requests went."),
    "top": ("octavo.cli.top", "top", "Watch a running server: queue, steps, what is short, what would help."),
    "bench": ("octavo.cli.bench", "bench", "Measure this engine on this machine."),
}


class _LazyGroup(click.Group):
    """A group whose help needs no command's module."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in _COMMANDS:
            ctx.fail(f"{args[0]!r} is no command; there are: {', '.join(_COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, _, help_line) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="octavo")
def cli() -> None:
    """Octavo: an LLM inference engine and server for the machine you have.

    Try: octavo run "What is the capital of France?"
    """


def main() -> None:
    """Entry point: user errors are one line on stderr and exit code 1 (2 for a bad command line), never a traceback."""
    try:
        cli.main(prog_name="octavo", standalone_mode=False)
    except click.exceptions.Exit as e:
        sys.exit(e.exit_code)
    except click.ClickException as e:
        e.show()
        sys.exit(e.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except (ValueError, OSError, RuntimeError) as e:
        # Every error Octavo raises for a user's input derives from these and says what to change.
        click.echo(f"octavo: {_message(e)}", err=True)
        sys.exit(1)


def _message(error: Exception) -> str:
    """The error's own sentence; a field of the configuration is named as its flag."""
    from octavo.config import ConfigError

    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror and error.filename is None:
        return error.strerror  # without "[Errno 98]"
    if isinstance(error, ConfigError):
        field, _, problem = text.partition(": ")
        return f"--{field.replace('_', '-')}: {problem}"
    return text


if __name__ == "__main__":
    main()
