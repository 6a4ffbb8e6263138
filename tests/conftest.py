"""What all tests share: the real models, the kernel paths of this machine, and how Hypothesis draws its examples."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

# A shell starts its background jobs with SIGINT ignored, and Python leaves it so; tests of Ctrl-C, and the programs they start,
# need it as in the foreground.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and no verdict that depends on how fast they are made. Others: `pytest --hypothesis-profile=default`.
settings.register_profile("steady", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


@pytest.fixture(scope="session", autouse=True)
def _share_of_the_cores() -> Iterator[None]:
    """Backends that are told no number of threads take this test process's share of the cores. Each would take all of them else, and
    threads that wait for each other at the end of every operation would wait for those of the other test processes."""
    from octavo.backends.cpu import backend
    from octavo.backends.machine import available_cpus

    share = max(1, available_cpus() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "available_cpus", lambda: share)
        yield


@pytest.fixture(autouse=True)
def _seeds_of_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Requests without a seed get the same ones in every run: an answer of two tokens ends after one where the first is drawn to be the
    last, and no test is to fail by that once in some hundred runs."""
    from octavo.engine import params

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(params, "secrets", SimpleNamespace(randbits=random.Random(request.node.nodeid).getrandbits))
        yield


def _real_model(name: str) -> Path:
    """A catalogue model from the cache (`make test` puts it there; by hand: `octavo pull NAME`)."""
    from octavo.models.catalog import CATALOG, cached_path

    path = cached_path(CATALOG[name])
    if path is None:
        pytest.fail(f"the real model {name} is not in the model cache; run `octavo pull {name}`")
    return path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return _real_model("smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    return _real_model("gemma3-270m")


def isa_levels() -> list[str]:
    from octavo.backends.cpu import _native

    return _native.isa_levels()


@pytest.fixture(params=["portable", "avx2", "avx512_vnni", "avx512_bf16"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each kernel path in turn; cpu backends made in the test take it. Skipped, by name, where the machine lacks one."""
    if request.param not in isa_levels():
        pytest.skip(f"this machine has no {request.param}")
    monkeypatch.setenv("OCTAVO_ISA", request.param)
    return str(request.param)
