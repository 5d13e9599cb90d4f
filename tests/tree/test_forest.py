import sys
import time
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import pytest

from megatron_dta.tree.forest import Forest, build_forest
from tests.forests import Batch, caterpillar, forest_of, make_plan, random_batch, star

NUM_RANDOM = 300


@dataclass(frozen=True)
class Case:
    """A forest beside its oracle: nodes are named by their path, a tuple of (id, tag)."""

    batch: Batch
    forest: Forest
    words: list[tuple]
    """Path of each sequence's last token."""
    node_of: dict[tuple, int]
    """Tree token of each path, followed through parent pointers."""


def make_case(batch: Batch) -> Case:
    tags = batch.identities or [None] * len(batch.tokens)
    words = [
        tuple(zip(t.tolist(), np.zeros(len(t), int) if tag is None else tag)) for t, tag in zip(batch.tokens, tags)
    ]
    forest = batch.forest()
    node_of: dict[tuple, int] = {}
    for word, node in zip(words, forest.sequence_end.tolist()):
        for end in range(len(word), 0, -1):
            assert node_of.setdefault(word[:end], node) == node, "one path, two tree tokens"
            node = int(forest.parent[node])
        assert node == -1, "a path longer than its sequence"
    return Case(batch, forest, words, node_of)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [make_case(random_batch(np.random.default_rng(seed))) for seed in range(NUM_RANDOM)]


def test_random_batches_hold_what_they_should(cases):
    """The property tests below mean something only if their inputs do."""
    words = [set(case.words) for case in cases]
    assert sum(len(w) < len(case.words) for w, case in zip(words, cases)) > 50, "duplicates"
    assert sum(any(a != b and b[: len(a)] == a for a in w for b in w) for w in words) > 50, "prefixes"
    assert sum((case.forest.parent < 0).sum() > 1 for case in cases) > 50, "several roots"
    assert sum(case.batch.identities is not None for case in cases) > 50, "identity tags"


def test_one_tree_token_per_distinct_path(cases):
    for case in cases:
        assert sorted(case.node_of.values()) == list(range(case.forest.num_tokens))


def test_tokens_depth_and_parent_follow_the_paths(cases):
    for case in cases:
        for path, node in case.node_of.items():
            assert case.forest.tokens[node] == path[-1][0]
            assert case.forest.depth[node] == len(path) - 1
            assert case.forest.parent[node] == case.node_of.get(path[:-1], -1)


def test_subtree_is_the_range_up_to_its_end(cases):
    for case in cases:
        for path, node in case.node_of.items():
            below = sorted(n for p, n in case.node_of.items() if p[: len(path)] == path)
            assert below == list(range(node, case.forest.subtree_end[node]))


def test_sequence_ends_lengths_and_paths_are_in_the_callers_order(cases):
    for case in cases:
        assert case.forest.lengths.tolist() == [len(word) for word in case.words]
        assert case.forest.sequence_end.tolist() == [case.node_of[word] for word in case.words]
        for i, word in enumerate(case.words):
            assert case.forest.path(i).tolist() == [case.node_of[word[:end]] for end in range(1, len(word) + 1)]


def test_terms_are_the_trained_tokens_of_every_sequence(cases):
    for case in cases:
        expected = [
            (i, position, case.node_of[word[: position + 1]])
            for i, (word, mask) in enumerate(zip(case.words, case.batch.loss_masks))
            for position in range(1, len(word))
            if mask[position]
        ]
        forest = case.forest
        assert list(zip(forest.term_sequence, forest.term_position, forest.term_target)) == expected
        assert forest.edges.tolist() == sorted({target for _, _, target in expected})
        assert forest.edges[forest.term_edge].tolist() == [target for _, _, target in expected]


def test_segments_are_runs_without_a_branch(cases):
    for case in cases:
        num_children = dict.fromkeys(case.node_of, 0)
        for path in case.node_of:
            if len(path) > 1:
                num_children[path[:-1]] += 1
        starts = [n for p, n in case.node_of.items() if len(p) == 1 or num_children[p[:-1]] > 1]
        assert case.forest.segment_start.tolist() == sorted(starts)


@pytest.mark.parametrize(
    ("sequences", "depth"),
    [
        ([[0, 1, 2, 3, 4, 10, 11, 12], [0, 1, 2, 3, 4, 20, 21, 22, 23]], [*range(5), 5, 6, 7, 5, 6, 7, 8]),
        ([[0, 1, 2, 3], [0, 1, 2, 4, 5], [0, 6, 7]], [0, 1, 2, 3, 3, 4, 1, 2]),
        ([[0, 1], [5, 6], [5, 7]], [0, 1, 0, 1, 1]),
    ],
    ids=["P5 A3 B4", "three levels", "two trees"],
)
def test_a06_depth_is_the_position_on_the_path(sequences, depth):
    assert forest_of(*sequences).depth.tolist() == depth


def test_a07_first_token_of_a_branch_is_predicted_from_the_prefix():
    prefix, a, b = [0, 1, 2, 3, 4], [10, 11, 12], [20, 21]
    forest = forest_of(prefix + a, prefix + b)
    first_of_b = int(forest.term_target[(forest.term_sequence == 1) & (forest.term_position == 5)][0])
    assert forest.tokens[first_of_b] == 20
    assert forest.parent[first_of_b] == 4
    assert forest.tokens[forest.parent[first_of_b]] == prefix[-1]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a08_a_sequence_its_prefix_and_itself_again(order):
    sequences = [[1, 2, 3, 4, 5], [1, 2, 3], [1, 2, 3, 4, 5]]
    forest = forest_of(*(sequences[i] for i in order))
    assert forest.tokens.tolist() == [1, 2, 3, 4, 5]
    assert forest.sequence_end.tolist() == [len(sequences[i]) - 1 for i in order]
    assert np.bincount(forest.term_target, minlength=5).tolist() == [0, 3, 3, 2, 2]
    assert forest.segment_start.tolist() == [0]


def test_a10_duplicates_are_executed_once_and_keep_their_terms():
    forest = forest_of([4, 5, 6], [4, 5, 6], [4, 5, 6])
    assert (forest.num_tokens, forest.num_sequences) == (3, 3)
    assert forest.edges.tolist() == [1, 2]
    assert forest.term_sequence.tolist() == [0, 0, 1, 1, 2, 2]
    assert forest.term_edge.tolist() == [0, 1] * 3


def test_a11_inner_levels_are_shared_too():
    p, a, b, c, d = ([10 * n + i for i in range(n)] for n in (7, 5, 3, 4, 2))
    forest = forest_of(p + a + b, p + a + c, p + d)
    assert forest.num_tokens == 7 + 5 + 3 + 4 + 2
    assert forest.lengths.sum() == 15 + 16 + 9
    assert len(forest.segment_start) == 5


def test_a13_other_ids_branch_even_if_they_spell_the_same_text():
    forest = forest_of([1, 2, 53122, 316, 9], [1, 2, 393, 30002, 9])
    ends = forest.sequence_end
    assert forest.num_tokens == 8
    assert forest.parent.tolist().count(1) == 2, "the branch is at the first differing id"
    assert forest.tokens[ends].tolist() == [9, 9]
    assert ends[0] != ends[1], "equal ids after a branch stay apart"


def test_a14_a_re_rendered_turn_branches_and_both_branches_train():
    turn, rendered = [1, 2, 3, 4, 5], [1, 2, 30, 4, 5, 6, 7]
    forest = forest_of(turn, rendered)
    assert forest.num_tokens == 2 + 3 + 5
    assert np.bincount(forest.term_sequence).tolist() == [4, 6]


@pytest.mark.parametrize(
    ("tags", "num_tokens"),
    [
        ([[0, 0, 0], [0, 0, 0]], 3),
        ([[5, 6, 7], [5, 6, 7]], 3),
        ([[0, 1, 0], [0, 2, 0]], 5),
        ([[1, 0, 0], [2, 0, 0]], 6),
        ([[0, 0, 0], None], 3),
        ([[0, 3, 0], None], 5),
        ([None, None], 3),
        ([[0, 0, 2**40], [0, 0, 2**40 + 1]], 4),
    ],
)
def test_a35_equal_ids_merge_only_where_identities_agree(tags, num_tokens):
    tokens = [np.array([1, 2, 3])] * 2
    identities = [None if tag is None else np.array(tag) for tag in tags]
    assert build_forest(tokens, identities=identities).num_tokens == num_tokens


@pytest.fixture
def shallow_stack():
    """Allow far fewer Python frames than a deep tree has levels."""
    limit, frame, depth = sys.getrecursionlimit(), sys._getframe(), 0
    while frame := frame.f_back:
        depth += 1
    sys.setrecursionlimit(depth + 80)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("shallow_stack")
@pytest.mark.parametrize("budget", [64, "whole"])
@pytest.mark.parametrize(("make", "size"), [(caterpillar, 5_000), (star, 10_000)])
def test_a38_deep_and_wide_trees_build_and_plan(make, size, budget):
    start = time.perf_counter()
    forest = build_forest(make(size))
    plan = make_plan(forest, budget)
    assert time.perf_counter() - start < 20
    assert forest.num_sequences == size
    assert forest.num_tokens == (2 * size if make is caterpillar else size + 1)
    assert forest.depth.max() == (size if make is caterpillar else 1)
    assert sum(len(chunk.tokens) for chunk in plan.chunks) == forest.num_tokens


def test_a38_nested_prefixes_are_one_chain():
    path = np.arange(2_000, dtype=np.int32)
    forest = build_forest([path[: i + 1] for i in range(len(path))])
    assert forest.sequence_end.tolist() == path.tolist()
    assert forest.segment_start.tolist() == [0]


def test_a_first_token_makes_no_term():
    forest = build_forest([np.array([1, 2])], [np.array([True, True])])
    assert (forest.term_position.tolist(), forest.term_target.tolist()) == ([1], [1])


def test_no_sequence_gives_an_empty_forest():
    forest = build_forest([], [])
    assert (forest.num_tokens, forest.num_sequences, len(forest.edges)) == (0, 0, 0)
    assert make_plan(forest, "whole").operations == ()


def test_without_masks_there_are_no_terms():
    assert len(build_forest([np.array([1, 2, 3])]).term_target) == 0


ONE = [np.array([1, 2, 3])]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([np.array([1]), np.array([], int)],), "sequence 1 is empty"),
        ((ONE, []), "loss_masks has 0 entries for 1 sequences"),
        ((ONE, [np.ones(2, bool)]), r"loss_masks\[0\] has length 2; sequence 0 has 3 tokens"),
        ((ONE, None, [np.zeros(4, int)]), r"identities\[0\] has length 4; sequence 0 has 3 tokens"),
        ((ONE, None, [None, None]), "identities has 2 entries for 1 sequences"),
    ],
)
def test_wrong_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_forest(*arguments)
