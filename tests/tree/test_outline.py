import numpy as np
import pytest

from megatron_dta.tree.forest import build_forest
from megatron_dta.tree.outline import Outline, build_outline, outline_of
from tests.forests import SHAPES, ancestor_sets, caterpillar, random_batch, star

FIELDS = ("length", "depth", "parent", "sources", "last")


def outlines(tokens, masks=None, tags=None) -> tuple[Outline, Outline]:
    return build_outline(tokens, masks, tags), outline_of(build_forest(tokens, masks, tags))


@pytest.mark.parametrize("seed", range(60))
def test_both_ways_to_an_outline_agree(seed):
    batch = random_batch(np.random.default_rng(seed))
    one, other = outlines(batch.tokens, batch.loss_masks, batch.identities)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)


@pytest.mark.parametrize("name", SHAPES)
def test_sequences_are_paths_of_whole_nodes(name):
    tokens = [np.array(t, np.int32) for t in SHAPES[name]]
    outline, _ = outlines(tokens)
    for t, node in zip(tokens, outline.last.tolist()):
        length = 0
        while node >= 0:
            length += outline.length[node]
            node = outline.parent[node]
        assert length == len(t)


@pytest.mark.parametrize("seed", range(20))
def test_counts_by_definition(seed):
    batch = random_batch(np.random.default_rng(seed))
    forest = batch.forest()
    outline = outline_of(forest)
    above = ancestor_sets(forest)
    sources = {int(forest.parent[t]) for t in forest.term_target}
    for node in range(outline.num_nodes):
        tokens = range(outline.start[node], outline.start[node + 1])
        assert outline.pairs[node] == sum(len(above[t]) + 1 for t in tokens)
        assert outline.sources[node] == len(sources & set(tokens))
        assert outline.size[node] == forest.subtree_end[tokens[0]] - tokens[0]
        assert (
            outline.end[node] == outline.num_nodes or outline.start[outline.end[node]] == forest.subtree_end[tokens[0]]
        )


@pytest.mark.parametrize("seed", range(30))
def test_part_of_is_the_outline_of_those_sequences(seed):
    rng = np.random.default_rng(seed)
    batch = random_batch(rng)
    chosen = np.flatnonzero(rng.random(len(batch.tokens)) < 0.6)
    part = build_outline(batch.tokens).part_of(chosen)
    alone = build_outline([batch.tokens[i] for i in chosen])
    # The whole may have branches and ends that the part has not: compare token by token.
    assert part.num_tokens == alone.num_tokens
    np.testing.assert_array_equal(token_depths(part), token_depths(alone))
    np.testing.assert_array_equal(part.start[part.last + 1], alone.start[alone.last + 1])


def token_depths(outline: Outline) -> np.ndarray:
    inside = np.arange(outline.num_tokens) - np.repeat(outline.start[:-1], outline.length)
    return np.repeat(outline.depth, outline.length) + inside


@pytest.mark.parametrize("tokens", [caterpillar(5000), star(10_000), []], ids=["caterpillar", "star", "nothing"])
def test_deep_wide_and_empty(tokens):
    one, other = outlines(tokens)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)


def test_parts_share_nothing():
    tokens = [np.array(t, np.int32) for t in ([1, 2, 3], [1, 2, 4], [1, 2, 3])]
    forest = build_forest(tokens, parts=np.array([1, 0, 1]))
    assert forest.num_tokens == 6
    assert forest.tokens.tolist() == [1, 2, 4, 1, 2, 3]
    assert forest.sequence_end.tolist() == [5, 2, 5]
    with pytest.raises(ValueError, match=r"parts has shape \(2,\)"):
        build_forest(tokens, parts=np.array([1, 0]))
