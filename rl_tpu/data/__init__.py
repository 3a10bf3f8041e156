"""Prompts: from files or generated problems to token ids, in an order with a saved position."""

from rl_tpu.data.prompts import PromptSet, check_source, load_prompts
from rl_tpu.data.stream import PromptStream
from rl_tpu.data.tokenizer import load_tokenizer

__all__ = ["PromptSet", "PromptStream", "check_source", "load_prompts", "load_tokenizer"]
