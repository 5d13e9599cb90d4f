"""Every sequence alone, unpadded, with stock causal attention: what trees must equal."""

import numpy as np
import torch

from megatron_dta.data.samples import Sample
from megatron_dta.engine.base import NO_LOSSES, Engine, StepResult, loss_grads
from megatron_dta.engine.batch import TermData, TermIndex, Totals
from megatron_dta.engine.calls import as_index
from megatron_dta.engine.executor import backward
from megatron_dta.engine.experts import RouterLosses, finish_counts, router_losses, routings
from megatron_dta.errors import UsageError
from megatron_dta.mcore.head import edge_logprobs
from megatron_dta.mcore.model import TreeModel
from megatron_dta.mcore.params import CallParams
from megatron_dta.mcore.routing import Routing
from megatron_dta.rl.terms import Objective
from megatron_dta.tree.plan import StageProgram


class FlatEngine(Engine):
    """Runs every sequence alone, unpadded, with stock causal attention: what `TreeEngine` must equal."""

    def __init__(
        self, model: TreeModel, *, temperature: float = 1.0, router_losses: RouterLosses = NO_LOSSES
    ):  # fmt: skip
        """Take a model that this process holds whole; raises UsageError for another."""
        super().__init__(model, temperature, router_losses)
        if model.axes.replica_size > 1 or model.axes.expert > 1:
            raise UsageError(
                f"every sequence alone runs on models that one process holds whole, not on {model.axes.describe()}; "
                "choose tree mode, or data-parallel ranks only"
            )

    def _train(self, samples, data: TermData, objective: Objective, plan, on_last_backward) -> StepResult:
        totals, executed = Totals(), 0
        lengths = [len(s.tokens) for s in samples]
        runs = data.scope.num_terms > 0
        (routed,) = routings(self.model, np.ones(sum(lengths), np.int64), data.scope.num_tokens, self.router_losses)
        has_losses = routed is not None and routed.has_losses
        if has_losses and runs:
            with torch.no_grad():
                for place, (sample, _) in self._parts(samples, untrained=True):
                    self._sequence(sample, routed, place)
            finish_counts([routed])
        for place, (sample, terms) in self._parts(samples, untrained=has_losses and runs):
            logprobs, entropies = self._sequence(sample, routed, place)
            leaves = logprobs.detach().requires_grad_(), entropies.detach().requires_grad_()
            grads = loss_grads(objective, data.terms(terms, *leaves), leaves, totals)
            backward((logprobs, entropies), grads)
            executed += len(sample.tokens)
        return StepResult(
            totals=totals.numbers(),
            scope=data.scope,
            num_terms=data.num_terms,
            sequence_tokens=sum(lengths),
            executed_tokens=executed,
            pushed_tokens=0,
            router_losses=router_losses(self.model, [routed]) if runs else {},
            term_logprobs=data.logprobs,
        )

    def _score(self, samples, index: TermIndex, plan: StageProgram | None) -> np.ndarray:
        logprobs = np.full(len(index.sequence), np.nan)
        with torch.no_grad():
            for _, (sample, terms) in self._parts(samples):
                logprobs[terms] = self._sequence(sample, None, 0)[0].cpu().numpy()
        return logprobs

    def _parts(self, samples, *, untrained: bool = False):
        """Yield (first token in the whole batch, (sample, its slice of the terms)), for samples that train a token."""
        place, start = 0, 0
        for sample in samples:
            stop = start + int(np.count_nonzero(sample.loss_mask[1:]))
            if stop > start or untrained:
                yield place, (sample, slice(start, stop))
            place, start = place + len(sample.tokens), stop

    def _sequence(self, sample: Sample, routed: Routing | None, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.model.output_weight()
        tokens = torch.from_numpy(sample.tokens.astype(np.int64)).to(weight.device)
        positions = torch.arange(len(tokens), device=weight.device)
        params = None if routed is None else CallParams(routing=routed, routed_tokens=place + positions)
        hidden = self.model(tokens[None], positions[None], None, packed_seq_params=params)[0]
        target = as_index(np.flatnonzero(sample.loss_mask[1:]) + 1, weight.device)
        return edge_logprobs(
            hidden[target - 1],
            weight,
            torch.arange(len(target), device=weight.device),
            tokens[target],
            temperature=self.temperature,
            vocab_size=self.model.model_config.vocab_size,
        )
