"""What every rank runs to hold the vocabulary-parallel head to the whole one: `python ranks_head.py`.

Prints "NAME ok" on rank 0 for every check that all ranks passed.
"""

from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist

from megatron_dta.mcore import head

HIDDEN = 6
TEMPERATURE = 0.7
LAYOUTS = {2: [(13, 8), (16, 8), (8, 8), (3, 8), (15, 8), (9, 8)], 4: [(13, 4), (16, 4), (6, 4), (1, 4)]}
"""By the number of ranks: (vocabulary, rows of a shard); padding in the last shard, nowhere, in whole shards."""
EDGES = {
    "several edges of a row and none of another": (5, [0, 0, 0, 2, 4]),
    "one": (1, [0]),
    "no edge": (3, []),
    "nothing": (0, []),
    "many": (40, sorted(torch.randint(40, (90,), generator=torch.Generator().manual_seed(0)).tolist())),
}
LOSSES = {"both": (1.0, 1.0), "log-probs": (1.0, None), "entropies": (None, 1.0)}

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(vocab: int, rows: int, edges: str, targets: str, scale: float = 1.0) -> Inputs:
    """Draw hidden states, the whole padded weight, sources and targets; the same on all ranks. Padding is poison."""
    generator = torch.Generator().manual_seed(vocab)
    num_rows, source = EDGES[edges]
    hidden = scale * torch.randn(num_rows, HIDDEN, dtype=torch.float64, generator=generator)
    weight = torch.randn(rows * dist.get_world_size(), HIDDEN, dtype=torch.float64, generator=generator)
    weight[vocab:] = 1e3
    low, high = {"anywhere": (0, vocab), "first": (0, min(rows, vocab)), "last": ((vocab - 1) // rows * rows, vocab)}[
        targets
    ]
    target = torch.randint(low, high, (len(source),), generator=generator)
    return hidden, weight, torch.tensor(source, dtype=torch.long), target


def coefficients(num_edges: int, num_rows: int, loss: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(n, dtype=torch.float64, generator=generator) for n in (num_edges, num_rows)]
    return tuple(None if weight is None else c for weight, c in zip(LOSSES[loss], drawn))


def run(outputs: Callable, hidden: torch.Tensor, weight: torch.Tensor, num_edges: int, loss: str) -> Result:
    """Return log-probs, entropies and the gradients of a loss of them."""
    hidden, weight = (x.clone().requires_grad_() for x in (hidden, weight))
    both = outputs(hidden, weight)
    used = [(o, c) for o, c in zip(both, coefficients(num_edges, len(hidden), loss)) if c is not None]
    torch.autograd.backward([o for o, _ in used], [c for _, c in used])
    assert hidden.grad is not None
    assert weight.grad is not None
    return *(o.detach() for o in both), hidden.grad, weight.grad


def whole(given: Inputs, vocab: int, loss: str) -> Result:
    hidden, weight, source, target = given

    def outputs(hidden, weight):
        return head.edge_logprobs(hidden, weight, source, target, temperature=TEMPERATURE, vocab_size=vocab)

    return run(outputs, hidden, weight, len(source), loss)


def plain(given: Inputs, vocab: int, loss: str) -> Result:
    hidden, weight, source, target = given

    def outputs(hidden, weight):
        logits = (hidden @ weight[:vocab].T / TEMPERATURE).log_softmax(-1)
        return logits[source, target], -(logits.exp() * logits).sum(-1)

    return run(outputs, hidden, weight, len(source), loss)


def sharded(given: Inputs, vocab: int, loss: str) -> Result:
    """Run this rank's shard; put the gradients together as the layers around the head do."""
    hidden, weight, source, target = given
    group, size = dist.group.WORLD, dist.get_world_size()

    def outputs(hidden, shard):
        return head.edge_logprobs(
            hidden, shard, source, target, temperature=TEMPERATURE, vocab_size=vocab, group=group
        )  # fmt: skip

    shard = weight.chunk(size)[dist.get_rank()]
    *values, grad_hidden, grad_shard = run(outputs, hidden, shard, len(source), loss)
    dist.all_reduce(grad_hidden)
    return *values, grad_hidden, torch.cat(gathered(grad_shard))


def gathered(own: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return parts


def assert_same(got: Result, wanted: Result) -> None:
    names = ("log-probs", "entropies", "d hidden", "d weight")
    for name, a, b in zip(names, got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def compare(vocab: int, rows: int, edges: str, targets: str, loss: str) -> None:
    given = inputs(vocab, rows, edges, targets)
    got = sharded(given, vocab, loss)
    assert_same(got, whole(given, vocab, loss))
    assert_same(got, plain(given, vocab, loss))
    for value in got:
        for other in gathered(value):
            assert torch.equal(other, value), "ranks differ in bits"
    assert (got[3][vocab:] == 0).all(), "padding has a gradient"


def check_layouts() -> None:
    for vocab, rows in LAYOUTS[dist.get_world_size()]:
        for edges in EDGES:
            for targets in ("anywhere", "first", "last"):
                compare(vocab, rows, edges, targets, "both")
        for loss in LOSSES:
            compare(vocab, rows, "many", "anywhere", loss)


def check_blocks() -> None:
    """Ranks cut their rows into blocks of their own, one of them into none."""
    for max_logits in (1, 16, 50):
        with mock.patch.dict(head.MAX_LOGITS, cpu=max_logits):
            for vocab, rows in LAYOUTS[dist.get_world_size()]:
                compare(vocab, rows, "many", "anywhere", "both")


def check_extreme_logits() -> None:
    """Logits of hundreds: the words of a rank may have no probability at all that a number can hold."""
    vocab, rows = LAYOUTS[dist.get_world_size()][0]
    given = inputs(vocab, rows, "many", "anywhere", scale=300.0)
    got = sharded(given, vocab, "both")
    wanted = plain(given, vocab, "both")
    assert wanted[0].min() < -800, "not extreme"
    assert (wanted[0].exp() == 0).any()
    assert_same(got, wanted)


def check_one_collective() -> None:
    """However many row blocks, a call has one collective in forward and none in backward."""
    counts = []
    for edges in ("one", "many"):
        given = inputs(*LAYOUTS[dist.get_world_size()][0], edges, "anywhere")
        shard = given[1].chunk(dist.get_world_size())[dist.get_rank()].requires_grad_()
        with (
            mock.patch.dict(head.MAX_LOGITS, cpu=1),
            mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as calls,
            mock.patch.object(dist, "all_reduce", side_effect=AssertionError("all_reduce")),
        ):
            logprob, entropy = head.edge_logprobs(
                given[0], shard, *given[2:], temperature=1.0, vocab_size=13, group=dist.group.WORLD
            )
            (logprob.sum() + entropy.sum()).backward()
        counts.append(calls.call_count)
    assert counts == [1, 1], counts


def check_low_precision() -> None:
    """bf16 operands that are exact: log-probs are right to a few roundings of fp32 numbers as large as they are."""
    generator = torch.Generator().manual_seed(0)
    vocab, rows = LAYOUTS[dist.get_world_size()][0]
    hidden = torch.randint(-2, 3, (40, 64), generator=generator)
    weight = torch.randint(-2, 3, (rows * dist.get_world_size(), 64), generator=generator)
    source, target = torch.arange(40), torch.randint(vocab, (40,), generator=generator)
    shard = weight.chunk(dist.get_world_size())[dist.get_rank()]
    logprob, entropy = head.edge_logprobs(
        hidden.bfloat16(), shard.bfloat16(), source, target, temperature=1.0, vocab_size=vocab, group=dist.group.WORLD
    )
    assert logprob.dtype == entropy.dtype == torch.float32
    logits = (hidden @ weight[:vocab].T).double()
    size = logits.abs().amax(1) + logits.log_softmax(-1).abs().amax(1)
    wanted = logits.log_softmax(-1)
    bound = 8 * torch.finfo(torch.float32).eps * size
    assert ((logprob - wanted[source, target]).abs() <= bound).all()
    assert ((entropy + (wanted.exp() * wanted).sum(-1)).abs() <= bound).all()


def controls() -> Iterator[tuple[str, mock._patch]]:
    """Yield mistakes that the comparison must find."""
    over_ranks, owned = head._over_ranks, head._owned

    def own_logprobs(lse, entropy, logprob, group):
        *rest, _ = over_ranks(lse, entropy, logprob, group)
        return *rest, logprob.expand(group.size(), -1)

    def own_entropies(lse, entropy, logprob, group):
        lses, _, logprobs = over_ranks(lse, entropy, logprob, group)
        return lses, entropy.expand(group.size(), -1), logprobs

    def own_sums(lse, entropy, logprob, group):
        _, *rest = over_ranks(lse, entropy, logprob, group)
        return lse.expand(group.size(), -1), *rest

    def owned_by_all(targets, first, num_words):
        word, _ = owned(targets, first, num_words)
        return word, torch.ones_like(word, dtype=torch.bool)

    yield "targets are not reduced", mock.patch.object(head, "_over_ranks", own_logprobs)
    yield "entropies are not reduced", mock.patch.object(head, "_over_ranks", own_entropies)
    yield "sums are not reduced", mock.patch.object(head, "_over_ranks", own_sums)
    yield "every rank has the target's gradient", mock.patch.object(head, "_owned", owned_by_all)


def check_controls() -> None:
    vocab, rows = LAYOUTS[dist.get_world_size()][0]
    given = inputs(vocab, rows, "many", "anywhere")
    wanted = whole(given, vocab, "both")
    for name, mistake in controls():
        with mistake:
            got = sharded(given, vocab, "both")
        try:
            assert_same(got, wanted)
        except AssertionError:
            continue
        raise AssertionError(f"{name}: not found")


CHECKS = (check_layouts, check_blocks, check_extreme_logits, check_one_collective, check_low_precision, check_controls)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for check in CHECKS:
        check()
        dist.barrier()
        if dist.get_rank() == 0:
            print(check.__name__, "ok", flush=True)
    dist.destroy_process_group()
