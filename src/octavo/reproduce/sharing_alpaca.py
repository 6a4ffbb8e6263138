"""Blocks saved by samples and beams with the lengths of Alpaca, measured: see ``sharing_measured``."""

from __future__ import annotations

from octavo.reproduce.figure import Figure
from octavo.reproduce.setup import Setup
from octavo.reproduce.sharing_measured import Case, make

NUMBER = 9
NAME = "sharing-alpaca"
FULL, QUICK = Case("alpaca", 32), Case("alpaca", 6)


def run(setup: Setup) -> Figure:
    return make(setup, QUICK if setup.quick else FULL, NUMBER)
