"""Train LLM policies on prefix trees inside Megatron-Core: every distinct token once, with each rollout's exact gradient."""

__version__ = "0.1.0"
