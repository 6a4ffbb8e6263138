"""The golden runs of the public cluster simulator, read from tests/fixtures/splitwise (its README says what they are)."""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

from octavo.costs.tables import Curve, MachineTable, TableCost
from octavo.simulator.block_cluster import ClusterSpec

FOLDER = Path(__file__).parents[1] / "fixtures" / "splitwise"
KV_BYTES_PER_TOKEN = 2 * 70 * 14336 * 2
NUM_KV_TOKENS = (8 * 85_899_345_920 - 329e9) / KV_BYTES_PER_TOKEN
TRANSFER_S_PER_TOKEN = KV_BYTES_PER_TOKEN / (200 * 2**30)
RUNS: list[dict[str, Any]] = json.loads((FOLDER / "golden.json").read_text())["runs"]


@cache
def table(hardware: str) -> MachineTable:
    found = json.loads((FOLDER / "bloom_tables.json").read_text())[hardware]
    curves = [Curve(map(tuple, found[name])) for name in ("prompt_s", "token_s", "batch_s")]
    return MachineTable(f"BLOOM-176B on {hardware}", *curves, found["context_slope_s"])


def trace(name: str) -> list[tuple[float, int, int]]:
    with open(FOLDER / name, newline="") as file:
        return [(float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]


def per_request(name: str) -> list[dict[str, float]]:
    with open(FOLDER / name, newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def spec(name: str, lookup: str = "published") -> ClusterSpec:
    """The cluster of a golden run; machines in the order in which it numbers them."""
    a100, h100 = TableCost(table("a100-80gb"), lookup), TableCost(table("h100-80gb"), lookup)
    machines = {
        "baseline-a100-4": [(a100, False)] * 4,
        "splitwise-aa-2p2t": [(a100, True)] * 2 + [(a100, False)] * 2,
        "splitwise-ha-2p2t": [(a100, False)] * 2 + [(h100, True)] * 2,
        "splitwise-aa-1p1t-overload": [(a100, True), (a100, False)],
    }[name]
    return ClusterSpec(machines, not name.startswith("baseline"), NUM_KV_TOKENS, TRANSFER_S_PER_TOKEN)
