"""Train LLM policies on prefix trees inside Megatron-Core: each token once, exactly."""

__version__ = "0.1.0"
