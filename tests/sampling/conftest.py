"""``make_sampler``: the reference and the native sampler of every ISA level, one after the other."""

from __future__ import annotations

from functools import partial

import pytest

from octavo.sampling.reference import ReferenceSampler

from .strategies import NativeSampler, isa_levels


@pytest.fixture(params=["reference", *isa_levels()])
def make_sampler(request):
    """A constructor (vocab_size, max_num_slots) -> sampler."""
    return ReferenceSampler if request.param == "reference" else partial(NativeSampler, isa=request.param)
