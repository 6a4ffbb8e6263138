"""`octavo cluster up`: a front end and its workers as a file describes them. The file's own fields are ``distributed.cluster_file``'s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.cluster_flags import cluster_plan
from octavo.cli.options import engine_config, engine_options
from octavo.cli.serve import serve, serve_with
from octavo.core.words import counted

if TYPE_CHECKING:
    from octavo.distributed.cluster_file import ClusterFile

_OWN = frozenset({"model", "workers", "workers_listen", "cluster_secret_file", "ray"})  # flags that other fields of the file stand for


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--check", is_flag=True, help="Say whether the file is in order, and start nothing.")
def up(file: str, check: bool) -> None:
    """Serve with the workers that FILE describes, until a signal.

    FILE is TOML (docs/cluster.md). Workers are placed by Ray where it has a [ray] table, else they are processes of this host.
    """
    from octavo.distributed.cluster_file import read_cluster_file

    described = read_cluster_file(file)
    arguments = serve_arguments(described, file)
    try:
        # Its own names of --help, since a command keeps those that it is first asked for.
        context = serve.make_context("octavo cluster up", arguments, help_option_names=["-h", "--help"])
    except click.UsageError as error:
        raise click.ClickException(f"{file}: {error.format_message()}") from None
    with context:
        if check:
            try:
                cluster_plan(context.params)
                engine_config(context.params)
            except click.UsageError as error:
                raise click.ClickException(f"{file}: {error.format_message()}") from None
            _check_surroundings(described, file)
            click.echo(f"{file} is in order: {counted(described.num_workers, 'worker')}")
        else:
            serve_with(context.params, described if described.ray is not None else None)


def _check_surroundings(described: ClusterFile, file: str) -> None:
    """What the file names has to be there: the secret, and models as far as that is known without a network. Raises ClickException."""
    from octavo.distributed.handshake import SecretError, read_secret
    from octavo.models.catalog import check_spec

    try:
        if described.secret_file is not None or (described.control_host is not None and described.ray is None):
            read_secret(None if described.secret_file is None else str(described.secret_file))
        check_spec(described.model)
        if isinstance(draft := described.engine.get("draft_model"), str):
            check_spec(draft)
    except (SecretError, RuntimeError) as error:
        raise click.ClickException(f"{file}: {error}") from None


def serve_arguments(described: ClusterFile, file: str) -> list[str]:
    """The command line of `octavo serve` that says what the file says, as far as flags can. Raises ClusterFileError."""
    workers = ",".join(f"{role}={number}" for role, number in described.workers.items())
    arguments = ["--model", described.model, "--workers", workers]
    if described.control_host is not None:
        host = f"[{described.control_host}]" if ":" in described.control_host else described.control_host
        arguments += ["--workers-listen", f"{host}:{described.control_port}"]
    if described.secret_file is not None:
        arguments += ["--cluster-secret-file", str(described.secret_file)]
    of_engine = {option.name for option in _options(click.command()(engine_options(lambda: None)))} | {"max_model_len"}
    flags = {str(option.name): option for option in _options(serve) if option.name not in _OWN}
    arguments += _flags(file, "serve", described.serve, {name: o for name, o in flags.items() if name not in of_engine})
    arguments += _flags(file, "engine", described.engine, {name: o for name, o in flags.items() if name in of_engine})
    if described.ray is not None:
        return [*arguments, "--ray"]
    threads = described.groups[0].cpus  # it and ``engine.threads`` say the same, and only one of them is allowed
    return arguments if threads is None else [*arguments, "--threads", str(threads)]


def _options(command: click.Command) -> list[click.Option]:
    return [param for param in command.params if isinstance(param, click.Option)]


def _flags(file: str, table: str, values: Mapping[str, Any], allowed: Mapping[str, click.Option]) -> Iterator[str]:
    """The flags that a table of the file stands for; their values are for click to check."""
    from octavo.distributed.cluster_file import ClusterFileError

    def bad(name: str, value: Any, limit: str) -> ClusterFileError:
        return ClusterFileError(f"{file}: {table}.{name}: {value!r} is not allowed; {limit}")

    for name, value in values.items():
        option = allowed.get(name)
        if option is None:
            raise ClusterFileError(f"{file}: {table}.{name}: there is no such field; there are: {', '.join(allowed)}")
        if option.is_flag:
            if not isinstance(value, bool):
                raise bad(name, value, "true or false")
            if value:
                yield option.opts[0]
        elif isinstance(value, bool) or not isinstance(value, str | int | float):
            raise bad(name, value, "a text or a number is needed")
        elif "\0" in str(value):
            raise bad(name, value, "a text without null characters is needed")
        else:
            yield from (option.opts[0], str(value))
