"""The `octavo` command. Imports nothing but click until a command runs, so that --help and --version are instant."""

from __future__ import annotations

import importlib
import sys

import click

VERSION = "0.1.0"

# command -> (module, attribute, one line of help): the module is imported when the command is.
_COMMANDS = {
    "run": ("octavo.cli.run", "run", "Answer one prompt and exit."),
    "chat": ("octavo.cli.chat", "chat", "Talk with a model in the terminal."),
    "serve": ("octavo.cli.serve", "serve", "Serve a model over an OpenAI-compatible API."),
    "pull": ("octavo.cli.models", "pull", "Download a model into the cache."),
    "models": ("octavo.cli.models", "models", "List the models of the catalogue and the cache."),
    "bench": ("octavo.cli.bench", "bench", "Measure this machine with this engine."),
}


class _LazyGroup(click.Group):
    """A group whose help needs no command's module."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[name]
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, _, help_line) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="octavo")
def cli() -> None:
    """Octavo: an LLM inference engine and server for the machine you have."""


def main() -> None:
    """Entry point: user errors are one line on stderr and exit code 1, never a traceback."""
    try:
        cli.main(standalone_mode=False)
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
        click.echo(f"octavo: {e}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
