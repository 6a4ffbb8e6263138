"""docs/flags.md and the commands say the same: every flag and its default, both ways; every environment variable that is read."""

from __future__ import annotations

import re

import click
import pytest

from octavo.cli.bench import bench
from octavo.cli.calibrate import calibrate
from octavo.cli.chat import chat
from octavo.cli.cluster import cluster
from octavo.cli.cluster_up import up
from octavo.cli.doctor import doctor
from octavo.cli.explain import explain
from octavo.cli.kv import kv
from octavo.cli.options import engine_options, model_options
from octavo.cli.plan import plan
from octavo.cli.quantize import quantize
from octavo.cli.reproduce import reproduce
from octavo.cli.run import run
from octavo.cli.serve import serve
from octavo.cli.simulate import simulate
from octavo.cli.top import top
from octavo.cli.worker import worker
from tests.docs.pages import ROOT, own_part, page, rows_by_name, section

PAGE = page("docs/flags.md")
OFFLINE = bench.commands["offline"]
SHARING = bench.commands["sharing"]
START = bench.commands["start"]
BENCH_SERVE = bench.commands["serve"]


def options_of(command: click.Command) -> dict[str, click.Option]:
    return {param.opts[0]: param for param in command.params if isinstance(param, click.Option)}


SHARED = set(options_of(click.command()(model_options(engine_options(lambda: None)))))
SECTIONS = {
    "serve": (serve, set(options_of(serve)) - SHARED),
    "worker": (worker, set(options_of(worker))),
    "cluster up": (up, set(options_of(up))),
    "run and chat": (chat, set(options_of(chat)) - SHARED),
    "run": (run, set(options_of(run)) - set(options_of(chat))),
    "bench offline": (OFFLINE, set(options_of(OFFLINE)) - SHARED),
    "bench start": (START, set(options_of(START))),
    "bench prefix": (bench.commands["prefix"], set(options_of(bench.commands["prefix"])) - SHARED),
    "bench cascade": (bench.commands["cascade"], set(options_of(bench.commands["cascade"])) - SHARED),
    "bench serve": (BENCH_SERVE, set(options_of(BENCH_SERVE)) - SHARED),
    "bench kernels": (bench.commands["kernels"], set(options_of(bench.commands["kernels"]))),
    "bench sharing": (SHARING, set(options_of(SHARING)) - SHARED),
    "bench preemption": (bench.commands["preemption"], set(options_of(bench.commands["preemption"])) - SHARED),
    "explain": (explain, set(options_of(explain))),
    "top": (top, set(options_of(top))),
    "bench scheduler": (bench.commands["scheduler"], set(options_of(bench.commands["scheduler"]))),
    "bench kv": (bench.commands["kv"], set(options_of(bench.commands["kv"])) - SHARED),
    "bench kv-rounding": (bench.commands["kv-rounding"], set(options_of(bench.commands["kv-rounding"])) - SHARED),
    "kv ls": (kv.commands["ls"], set(options_of(kv.commands["ls"]))),
    "kv clear": (kv.commands["clear"], set(options_of(kv.commands["clear"]))),
    "bench advice": (bench.commands["advice"], set(options_of(bench.commands["advice"])) - SHARED),
    "bench cluster": (bench.commands["cluster"], set(options_of(bench.commands["cluster"]))),
    "cluster status": (cluster.commands["status"], set(options_of(cluster.commands["status"]))),
    "cluster drain": (cluster.commands["drain"], set(options_of(cluster.commands["drain"]))),
    "cluster undrain": (cluster.commands["undrain"], set(options_of(cluster.commands["undrain"]))),
    "cluster restart": (cluster.commands["restart"], set(options_of(cluster.commands["restart"]))),
    "bench waste": (bench.commands["waste"], set(options_of(bench.commands["waste"]))),
    "bench simulator": (bench.commands["simulator"], set(options_of(bench.commands["simulator"])) - SHARED),
    "bench cluster-ways": (bench.commands["cluster-ways"], set(options_of(bench.commands["cluster-ways"])) - SHARED),
    "bench routing": (bench.commands["routing"], set(options_of(bench.commands["routing"]))),
    "bench goodput": (bench.commands["goodput"], set(options_of(bench.commands["goodput"]))),
    "calibrate": (calibrate, set(options_of(calibrate)) - SHARED),
    "quantize": (quantize, set(options_of(quantize))),
    "plan": (plan, set(options_of(plan))),
    "simulate": (simulate, set(options_of(simulate))),
    "reproduce": (reproduce, set(options_of(reproduce))),
    "doctor": (doctor, set(options_of(doctor))),
    "Model and engine": (serve, SHARED),
}


@pytest.mark.parametrize("title", SECTIONS)
def test_every_flag_is_documented_and_no_other(title: str) -> None:
    _, names = SECTIONS[title]
    assert set(rows_by_name(own_part(PAGE, title))) == names


@pytest.mark.parametrize("command", [run, chat, serve, OFFLINE, SHARING, BENCH_SERVE], ids=lambda command: command.name)
def test_the_engine_flags_are_the_same_for_all(command: click.Command) -> None:
    options, of_serve = options_of(command), options_of(serve)
    assert {name: options[name].default for name in SHARED} == {name: of_serve[name].default for name in SHARED}


@pytest.mark.parametrize("title", SECTIONS)
def test_defaults(title: str) -> None:
    command, _ = SECTIONS[title]
    for name, row in rows_by_name(own_part(PAGE, title)).items():
        option, shown = options_of(command)[name], row[1].strip("`")
        if name == "--temperature":
            assert shown == f"{options_of(run)[name].default} for run, {option.default} for chat"
        elif option.is_flag or option.to_info_dict()["default"] is None:
            assert shown == "", name
        else:
            assert shown == str(option.default), name


def test_other_names_and_choices() -> None:
    for title, (command, _) in SECTIONS.items():
        for name, row in rows_by_name(own_part(PAGE, title)).items():
            option = options_of(command)[name]
            assert re.findall(r"`([^`]*)`", row[0]) == option.opts
            if isinstance(option.type, click.Choice):
                assert {f"`{choice}`" for choice in option.type.choices} <= set(re.findall(r"`[^`]*`", row[2]))


def test_environment_variables() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    assert set(rows_by_name(section(PAGE, "Environment"))) == set(re.findall(r"OCTAVO_[A-Z_]+", sources))
