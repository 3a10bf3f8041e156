"""What several rooms share."""

import os

import pytest

# torch's stores ask the name server for the name of every peer; where an answer gets lost, each test would wait 5 s for it.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# As rl_tpu does: tests that import torch before it should not start accelerator packages either.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def byte_tokenizer():
    """A real Hugging Face tokenizer with a ChatML template: one token per byte, so lengths are easy to count."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML)
