"""What workers tell to count, right or wrong, beside one another: a scraper gets all that has a form, and no text that it cannot read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from octavo.distributed.merged_metrics import merged_families
from octavo.engine.serving import MetricFamily
from octavo.server.prometheus import exposition

OWN = [MetricFamily("octavo_lost", "counter", "of the front end", [({}, 1.0)])]


def lines(*families: MetricFamily, own: list[MetricFamily] = OWN, workers: tuple[str, ...] = ("liar",)) -> dict[str, float]:
    """The text that a scraper reads: each sample once, by its name and labels."""
    told = [(worker, "both", families) for worker in workers]
    body = exposition(merged_families(own, [*told, ("honest", "both", [MetricFamily("octavo_steps", "counter", "steps", [({}, 7.0)])])]))[0]
    found = dict[str, float]()
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            name = f"{sample.name}{sorted(sample.labels.items())}"
            assert name not in found, f"{name} is there twice"
            found[name] = sample.value
    return found


HONEST = lines()


@pytest.mark.parametrize(
    "family",
    [
        MetricFamily("ok", "bogus", "an unknown kind", [({}, 1.0)]),
        MetricFamily("", "gauge", "no name", [({}, 1.0)]),
        MetricFamily("bad name", "gauge", "a name with a blank", [({}, 1.0)]),
        MetricFamily("x\ny", "gauge", "a name of two lines", [({}, 1.0)]),
        MetricFamily("x", "histogram", "without classes", [({}, [])], [1.0]),
        MetricFamily("x", "histogram", "with a class too few", [({}, [1.0, 2.0])], [1.0]),
        MetricFamily("x", "histogram", "with a class of fewer than none", [({}, [1.0, -2.0, 3.0])], [1.0]),
        MetricFamily("x", "histogram", "that is a number", [({}, 1.0)], [1.0]),
        MetricFamily("x", "histogram", "whose classes do not ascend", [({}, [1.0, 1.0, 1.0, 3.0])], [2.0, 2.0]),
        MetricFamily("x", "histogram", "told apart by its own label", [({"le": "1"}, [1.0, 1.0, 3.0])], [1.0]),
        MetricFamily("x", "gauge", "that is a histogram", [({}, [1.0, 2.0, 3.0])]),
        MetricFamily("x", "gauge", "a label that is no name", [({"bad label": "x"}, 1.0)]),
        MetricFamily("octavo_lost_total", "gauge", "samples of the name of another's", [({}, 1.0)]),
        MetricFamily("octavo_lost", "gauge", "another kind than ours", [({}, 1.0)]),
    ],
    ids=lambda family: family.help,
)
def test_what_has_no_form_is_left_out_and_all_else_is_shown(family: MetricFamily) -> None:
    found = lines(family)
    assert {name: value for name, value in found.items() if "liar" not in name} == HONEST and len(HONEST) == 2
    assert found == HONEST


def test_what_has_one_is_shown_with_whose_it_is() -> None:
    twice = MetricFamily("x", "gauge", "h", [({"of": "a"}, 1.0), ({"of": "b"}, None), ({"of": "a"}, 2.0), ({"worker": "me"}, 3.0)])
    found = lines(twice, MetricFamily("y", "histogram", "h", [({}, [1.0, 2.0, 5.5])], [0.5]), workers=("a", "b"))
    for worker in ("a", "b"):
        whose = f"('role', 'both'), ('worker', '{worker}')"
        assert found[f"x[('of', 'a'), {whose}]"] == 1.0 and found[f"x[{whose}]"] == 3.0
        assert found[f"x[('of', 'b'), {whose}]"] != found[f"x[('of', 'b'), {whose}]"], "not a number"
        assert found[f"y_bucket[('le', '0.5'), {whose}]"] == 1.0 and found[f"y_count[{whose}]"] == 3.0


NAMES = st.sampled_from(["x", "x_total", "x_bucket", "octavo_lost", "octavo_steps", "bad name", "le", "é", ""])
LABELS = st.dictionaries(st.sampled_from(["a", "le", "worker", "role", "b c", "1", ""]), st.text(max_size=3), max_size=3)
NUMBERS = st.floats(allow_nan=False)
VALUES = st.one_of(st.none(), NUMBERS, st.lists(NUMBERS, max_size=4))
KINDS = st.sampled_from(["counter", "gauge", "histogram", "summary", "info", "x", ""])
FAMILIES = st.builds(
    MetricFamily, NAMES, KINDS, st.text(max_size=3), st.lists(st.tuples(LABELS, VALUES), max_size=3), st.lists(NUMBERS, max_size=2)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(FAMILIES, max_size=4))
def test_whatever_a_worker_tells_a_scraper_can_read_what_there_is(families: list[MetricFamily]) -> None:
    found = lines(*families)
    own = [name for name in HONEST if "front_end" in name]
    assert {name: found[name] for name in own} == {name: HONEST[name] for name in own}
