"""Rotary embedding by depth: a token's position is its place on its path, never its place in the chunk."""

import math

import torch
from torch import nn

from megatron_dta.mcore.params import TreeParams
from megatron_dta.model_config import ModelConfig, RopeScaling


class TreeRotary(nn.Module):
    """Stands in for `GPTModel.rotary_pos_emb`: one row of angles per row of the call.

    GPTModel asks `get_rotary_seq_len` first and hands its answer to `forward`; that answer is the call's depths where
    there is a plan and a length where there is none. Angles are fp32, as the checkpoints were trained with.
    """

    def __init__(self, config: ModelConfig, device: torch.device):
        super().__init__()
        dims = torch.arange(0, config.head_size, 2, dtype=torch.float32, device=device)
        frequencies = 1.0 / config.rope_theta ** (dims / config.head_size)
        self.inv_freq = scale_frequencies(frequencies, config.rope_scaling) if config.rope_scaling else frequencies

    def get_rotary_seq_len(
        self, inference_context, transformer, transformer_input, transformer_config, packed_seq_params=None, **_
    ) -> torch.Tensor | int:
        """Return the depth of every row (int [R]), or the number of rows."""
        if isinstance(packed_seq_params, TreeParams):
            return packed_seq_params.depth
        hidden = transformer.input_tensor if transformer.input_tensor is not None else transformer_input
        ranks = transformer_config.tensor_model_parallel_size if transformer_config.sequence_parallel else 1
        return hidden.size(0) * ranks  # attention has all rows

    def forward(self, positions: torch.Tensor | int, *_, **__) -> torch.Tensor:
        """Return the angles [R, 1, 1, head_size] of the given depths, or of positions 0 .. R - 1."""
        if isinstance(positions, int):
            positions = torch.arange(positions, device=self.inv_freq.device)
        angles = torch.outer(positions.to(torch.float32), self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def scale_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Stretch low frequencies as Llama 3.1 does (transformers' `llama3` rope type), blending in between."""
    wavelength = 2 * math.pi / frequencies
    low, high = (
        scaling.original_max_positions / factor for factor in (scaling.low_freq_factor, scaling.high_freq_factor)
    )
    blend = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    stretched = frequencies / scaling.factor
    blended = (1 - blend) * stretched + blend * frequencies
    result = torch.where(wavelength > low, stretched, frequencies)
    return torch.where((wavelength <= low) & (wavelength >= high), blended, result)
