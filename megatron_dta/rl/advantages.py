"""Advantages from rewards, by group ids: where a group's members stand in a batch or a tree never matters."""

import torch


def group_advantages(rewards: torch.Tensor, groups: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """Return (reward - group mean) / (group standard deviation + eps), fp64 [n] (arXiv 2402.03300, section 4.1.2).

    rewards: [n]; groups: int [n], any numbering. The deviation is the unbiased one. A group of one, or one whose
    rewards are all equal, gets 0. A NaN reward is left out of its group's statistics and gets 0.
    """
    rewards = rewards.double()
    valid = ~rewards.isnan()
    _, index = groups.unique(return_inverse=True)
    num_groups = int(index.max()) + 1 if len(index) else 0

    def total(values: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(num_groups, dtype=torch.float64, device=rewards.device)
        return zeros.index_add(0, index, values.where(valid, 0.0))

    count = total(torch.ones_like(rewards))
    centred = rewards - (total(rewards) / count.clamp(min=1))[index]
    # Rounding of the mean alone must not be blown up to +-1 in a group of equal rewards.
    noise = 4 * torch.finfo(torch.float64).eps * rewards.abs() * count[index]
    centred = centred.where(centred.abs() > noise, 0.0)
    deviation = (total(centred**2) / (count - 1).clamp(min=1)).sqrt()
    return (centred / (deviation + eps)[index]).where(valid & (count > 1)[index], 0.0)
