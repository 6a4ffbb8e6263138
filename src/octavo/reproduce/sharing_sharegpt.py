"""Blocks saved by samples and beams with the lengths of ShareGPT, measured: see ``sharing_measured``."""

from __future__ import annotations

from octavo.reproduce.figure import Figure
from octavo.reproduce.setup import Setup
from octavo.reproduce.sharing_measured import Case, make

NUMBER = 10
NAME = "sharing-sharegpt"
FULL, QUICK = Case("sharegpt", 6), Case("sharegpt", 2)


def run(setup: Setup) -> Figure:
    return make(setup, QUICK if setup.quick else FULL, NUMBER)
