"""The page of a batch's plans: its pieces by brute force, its numbers by the cost model, and nothing from outside."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from megatron_dta import drawing
from megatron_dta.drawing import calls_of, draw_plans, pieces_of
from megatron_dta.tree.cost import CallCost, CostModel
from megatron_dta.tree.forest import Forest, build_forest
from megatron_dta.tree.plan import Chunk, Kind, Operation, Plan
from megatron_dta.tree.schedule import schedule
from tests.forests import (
    SHAPES,
    ancestor_sets,
    broom,
    caterpillar,
    make_plan,
    random_assignment,
    random_forest,
    shaped,
    star,
    visible_pairs,
)

BUDGETS = [1, 2, 5, 17, "whole"]
COST = CostModel(
    machine="unit test",
    chunk=CallCost(launch=3.0, fixed=0.5, row=0.25, pair=0.125, context=0.0625, source=0.03125),
    push=CallCost(launch=1.0, fixed=0.25, row=0.125, pair=0.0625, context=0.03125, source=0.0),
)


def forests() -> dict[str, Forest]:
    named = {name: shaped(name) for name in SHAPES}
    named |= {"caterpillar": build_forest(caterpillar(30)), "star of 40": build_forest(star(40))}
    named |= {"broom": build_forest(broom(20, 5, 7)), "empty": build_forest([])}
    return named | {f"random {seed}": random_forest(seed) for seed in range(12)}


FORESTS = forests()


def planned(forest: Forest) -> list[Plan]:
    plans = [make_plan(forest, budget) for budget in BUDGETS]
    rng = np.random.default_rng(len(forest.tokens))
    return [*plans, schedule(forest, random_assignment(forest, rng, 4), capacity=forest.num_tokens)]


def no_op(forest: Forest, size: int) -> Plan:
    """Return a plan whose last chunk holds no token: the rank keeps step with others."""
    rows, none = np.arange(size, dtype=np.int32), np.zeros(0, np.int32)
    fields = ("tokens", "context", "context_state", "context_grad", "fresh_grad", "own_rows", "own_grad")
    fields += ("source_rows", "edges", "edge_source", "terms", "term_edge")
    chunk = Chunk(size=size, visible_from=rows, visible_to=rows + 1, **dict.fromkeys(fields, none))
    plan = make_plan(forest, "whole")
    index = len(plan.chunks)
    added = tuple(Operation(kind=kind, index=index) for kind in (Kind.FORWARD, Kind.BACKWARD))
    return replace(plan, chunks=(*plan.chunks, chunk), operations=(*plan.operations, *added))


def numbers_in(page: str) -> dict:
    (found,) = re.findall(r'<script type="application/json" id="numbers">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


@pytest.mark.parametrize("forest", FORESTS.values(), ids=FORESTS.keys())
def test_pieces_partition_the_forest_by_segment_chunk_and_pushed(forest):
    above = ancestor_sets(forest)
    for plan in planned(forest):
        pieces = pieces_of(plan)
        covered = [t for first, n in zip(pieces.first, pieces.count) for t in range(first, first + n)]
        assert covered == list(range(forest.num_tokens))
        assert (pieces.count > 0).all()

        chunk = {t: index for index, chunk in enumerate(plan.chunks) for t in chunk.tokens.tolist()}
        pushed = {a for t in range(forest.num_tokens) for a in above[t] if chunk[a] != chunk[t]}
        segment = np.searchsorted(forest.segment_start, np.arange(forest.num_tokens), side="right")
        kinds = [(segment[t], chunk[t], t in pushed) for t in range(forest.num_tokens)]
        for k, (first, n) in enumerate(zip(pieces.first, pieces.count)):
            assert {kinds[t] for t in range(first, first + n)} == {kinds[first]}
            assert kinds[first][1:] == (pieces.chunk[k], pieces.pushed[k])
            assert first == 0 or kinds[first - 1] != kinds[first], "not maximal"
            assert pieces.depth[k] == len(above[first])
            assert pieces.end[k] == max([t for t in range(forest.num_tokens) if first in above[t]], default=first) + 1


@pytest.mark.parametrize("forest", FORESTS.values(), ids=FORESTS.keys())
def test_the_page_holds_what_the_pieces_are(forest):
    for plan in planned(forest):
        pieces, (rank,) = pieces_of(plan), numbers_in(draw_plans([plan], COST, title="", facts={}))["ranks"]
        count, back, code = (np.array(rank["pieces"][name], int) for name in ("count", "back", "code"))
        depth, end = [], 0
        for k in range(len(count)):  # as the page does it
            depth.append(end - back[k])
            end = depth[-1] + count[k]
        np.testing.assert_array_equal(count, pieces.count)
        np.testing.assert_array_equal(depth, pieces.depth)
        np.testing.assert_array_equal(code // 2, pieces.chunk)
        np.testing.assert_array_equal(code % 2, pieces.pushed)
        first = np.cumsum(count) - count
        ends = [
            next((first[j] for j in range(k + 1, len(count)) if depth[j] <= depth[k]), plan.forest.num_tokens)
            for k in range(len(count))
        ]
        np.testing.assert_array_equal(ends, pieces.end)


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_calls_are_counted_by_definition_and_take_what_the_cost_model_says(multiple, in_flight):
    for forest in FORESTS.values():
        plan = make_plan(forest, 8, multiple=multiple, in_flight=in_flight)
        calls = calls_of(plan, COST)
        expected = []
        for operation in plan.operations:
            if operation.kind == Kind.PUSH:
                call, cost, sources, chunk = plan.pushes[operation.index], COST.push, 0, -1
            elif operation.kind == Kind.BACKWARD:
                call, cost, chunk = plan.chunks[operation.index], COST.chunk, operation.index
                sources = len(call.source_rows)
            else:
                continue
            own = [forest.depth[t] + 1 for t in call.tokens] + [1] * (call.size - len(call.tokens))
            seconds = float(cost.seconds(call.size, sum(own), len(call.context), sources))
            expected.append((chunk, call.size, len(call.tokens), sum(own), len(call.context), sources, seconds))
        columns = calls.chunk, calls.rows, calls.tokens, calls.pairs, calls.context, calls.sources, calls.seconds
        assert list(zip(*(column.tolist() for column in columns))) == expected

        (rank,) = numbers_in(draw_plans([plan], COST, title="", facts={}))["ranks"]
        total = sum(call[-1] for call in expected)
        assert sum(rank["seconds"]) == pytest.approx(total, rel=5e-4)
        assert rank["rows"] == [call[1] for call in expected]


def test_pairs_are_those_that_the_masks_show():
    for forest in FORESTS.values():
        plan = make_plan(forest, 6, multiple=3)
        calls = calls_of(plan, COST)
        pushes = iter(plan.pushes)
        run = [next(pushes) if chunk < 0 else plan.chunks[chunk] for chunk in calls.chunk]
        assert calls.pairs.tolist() == [int(visible_pairs(forest, call).sum()) for call in run]


def test_seconds_keep_four_digits():
    cost = replace(COST, chunk=COST.chunk.scaled(1 / 3, 1e-9), push=COST.push.scaled(1 / 7, 1e-9))
    plan = make_plan(shaped("comb"), 5)
    (rank,) = numbers_in(draw_plans([plan], cost, title="", facts={}))["ranks"]
    np.testing.assert_allclose(rank["seconds"], calls_of(plan, cost).seconds, rtol=5e-4)
    assert max(len(str(seconds).replace(".", "").lstrip("0")) for seconds in rank["seconds"]) == 4


@pytest.mark.parametrize(
    "plans",
    [
        [make_plan(build_forest([]), 4)],
        [no_op(build_forest([]), 128)],
        [no_op(shaped("comb"), 3), make_plan(build_forest([]), 4)],
        [make_plan(shaped("star"), 3)],
        [make_plan(shaped("several trees"), 3)] * 64,
        [make_plan(random_forest(seed), 4, multiple=2) for seed in range(70)],
    ],
    ids=["empty", "no-op", "no-op and empty", "one rank", "64 ranks", "70 ranks"],
)
def test_odd_batches_make_a_page(plans):
    numbers = numbers_in(draw_plans(plans, COST, title="odd", facts={"ranks": str(len(plans))}))
    assert len(numbers["ranks"]) == len(plans)
    assert numbers["machine"] == COST.machine
    for plan, rank in zip(plans, numbers["ranks"]):
        assert sum(rank["pieces"]["count"]) == plan.forest.num_tokens
        assert len(rank["seconds"]) == len(plan.pushes) + len(plan.chunks)


def test_a_chunk_without_tokens_takes_time_and_is_all_padding():
    calls = calls_of(no_op(build_forest([]), 128), COST)
    assert (calls.rows.tolist(), calls.tokens.tolist(), calls.pairs.tolist()) == ([128], [0], [128])
    assert calls.seconds.tolist() == [0.5 + 0.25 * 128 + 0.125 * 128]


def test_no_plan_is_refused():
    with pytest.raises(ValueError, match="no plan to draw"):
        draw_plans([], COST, title="", facts={})


def test_text_is_escaped_and_placeholders_in_it_stay_text():
    title = "<b>\"R&D\"</b> {{numbers}} \\1 '</title>'"
    facts = {"<i>": "a & b", "{{title}}": "</script><script>bad()</script>"}
    cost = replace(COST, machine="</script><img src=x>")
    page = draw_plans([make_plan(shaped("chain"), 4)], cost, title=title, facts=facts)
    shown = "&lt;b&gt;&quot;R&amp;D&quot;&lt;/b&gt; {{numbers}} \\1 &#x27;&lt;/title&gt;&#x27;"
    assert f"<title>{shown}</title>" in page
    assert f"<h1>{shown}</h1>" in page
    assert "<tr><th>&lt;i&gt;</th><td>a &amp; b</td></tr>" in page
    assert "<th>{{title}}</th>" in page
    assert page.count("</script>") == 2
    assert "<img" not in page
    assert numbers_in(page)["machine"] == cost.machine


def test_page_reaches_nothing_outside_itself():
    page = draw_plans([make_plan(shaped("comb"), 4)] * 3, COST, title="plans", facts={"budget": "4 rows"})
    assert not re.findall(r"https?:|//\w|\b(?:src|href|action)\s*=|@import|url\(|fetch\(|XMLHttp|\bimport\b", page)
    assert "://" not in page
    assert "default-src 'none'" in page
    assert not re.findall(r"\{\{\w*\}\}", page), "a placeholder is left"


def test_ranks_that_do_not_fit_the_page_keep_their_timeline(monkeypatch):
    """The page has room for so many pieces: the forests of the ranks that take longest, the longest in any case."""
    plans = [make_plan(shaped(name), 3) for name in ("one token", "comb", "star")]
    size = [len(pieces_of(plan).first) for plan in plans]
    order = np.argsort([-calls_of(plan, COST).seconds.sum() for plan in plans]).tolist()
    assert order[0] == 1, "the comb takes longest"
    for room, held in ((1, {1}), (size[1], {1}), (size[1] + size[order[1]], {1, order[1]}), (1000, {0, 1, 2})):
        monkeypatch.setattr(drawing, "MOST_PIECES", room)
        ranks = numbers_in(draw_plans(plans, COST, title="", facts={}))["ranks"]
        assert {k for k, rank in enumerate(ranks) if rank["pieces"]} == held
        assert all(rank["seconds"] for rank in ranks)


def test_page_of_a_large_batch_is_small():
    """512 ranks with ten calls each, and a forest of tens of thousands of segments: a few MB."""
    sequences = [np.append(np.arange(50), [k % 300, k]).astype(np.int32) for k in range(30_000)]
    large = make_plan(build_forest(sequences), 4096, multiple=128)
    assert len(large.forest.segment_start) > 30_000
    ranks = [make_plan(build_forest(caterpillar(60)), 12)] * 511
    assert len(ranks[0].operations) > 20
    assert len(draw_plans([large, *ranks], COST, title="", facts={})) < 2_000_000
