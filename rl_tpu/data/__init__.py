"""Prompts: from files or generated problems to token ids, in an order with a saved position."""

from rl_tpu.data.files import files_exist
from rl_tpu.data.prompts import PromptSet, check_source, load_prompts, load_training_prompts
from rl_tpu.data.selection import describe_source
from rl_tpu.data.stream import MixtureStream, PromptStream, open_stream
from rl_tpu.data.tokenizer import load_tokenizer

__all__ = [
    "MixtureStream",
    "PromptSet",
    "PromptStream",
    "check_source",
    "describe_source",
    "files_exist",
    "load_prompts",
    "load_tokenizer",
    "load_training_prompts",
    "open_stream",
]
