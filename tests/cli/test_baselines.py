"""The switches to the mechanisms of earlier engines: each changes one field of the configuration."""

from __future__ import annotations

from dataclasses import replace

import click
import pytest
from click.testing import CliRunner

from octavo.cli.options import engine_config, engine_options
from octavo.config import EngineConfig

PLAIN = EngineConfig()


def config_of(*argv: str) -> EngineConfig:
    made: list[EngineConfig] = []
    command = click.command()(engine_options(lambda **options: made.append(engine_config(options))))
    result = CliRunner().invoke(command, argv, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return made[0]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), PLAIN),
        (("--no-enable-chunked-prefill",), replace(PLAIN, scheduler=replace(PLAIN.scheduler, enable_chunked_prefill=False))),
        (("--no-enable-prefix-caching",), replace(PLAIN, cache=replace(PLAIN.cache, enable_prefix_caching=False))),
        (("--scheduling-policy", "static"), replace(PLAIN, scheduler=replace(PLAIN.scheduler, scheduling_policy="static"))),
        (
            ("--no-enable-prefix-caching", "--kv-reservation", "oracle"),
            replace(PLAIN, cache=replace(PLAIN.cache, enable_prefix_caching=False, kv_reservation="oracle")),
        ),
    ],
)
def test_one_switch_one_field(argv: tuple[str, ...], expected: EngineConfig) -> None:
    assert config_of(*argv) == expected


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(click.BadParameter, match="'max' is not allowed; reserved blocks are never shared: turn enable_prefix_caching off"):
        config_of("--kv-reservation", "max")
    with pytest.raises(click.BadParameter, match="'best' is not one of"):
        config_of("--kv-reservation", "best")
