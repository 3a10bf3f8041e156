"""Chat templates that behave like those of well-known models, written for the tests, and tokenizers for them."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_START = "'<|im_start|>' + message.role + '\n'"
_END = "'<|im_end|>\n'"
_OPENING = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

CHATML = f"{{% for message in messages %}}{{{{ {_START} + message.content + {_END} }}}}{{% endfor %}}" + _OPENING

# Qwen: tools stand in the system turn, and answers of neighbouring tools become one turn of the user.
_WITH_TOOLS = (
    "{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "{{ '# Tools' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}"
)
_OWN_SYSTEM = (
    "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
)
_PLAIN_TURN = f"{{{{ {_START} + message.content + {_END} }}}}"
_ANSWERS = (
    "{% elif message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
_NOT_FIRST_SYSTEM = "message.role == 'user' or (message.role == 'system' and not loop.first)"

# A default system turn; turns of the assistant stay as they are.
QWEN2_5 = (
    "{% if tools %}"
    + _WITH_TOOLS
    + _OWN_SYSTEM
    + "{% else %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}{% for message in messages %}"
    + f"{{% if message.role == 'assistant' or {_NOT_FIRST_SYSTEM} %}}"
    + _PLAIN_TURN
    + _ANSWERS
    + "{% endif %}{% endfor %}"
    + _OPENING
)

# Reasoning stays only in turns after the user's last question (answers of tools are none). The last turn always has a
# reasoning block. `enable_thinking: false` opens a turn with an empty one.
QWEN3 = (
    "{% if tools %}"
    + _WITH_TOOLS
    + _OWN_SYSTEM
    + "{% endif %}{% set last = namespace(question=messages | length - 1, found=false) %}"
    "{% for message in messages | reverse %}"
    "{% if not last.found and message.role == 'user' and not message.content.startswith('<tool_response>') %}"
    "{% set last.found = true %}{% set last.question = messages | length - loop.index %}{% endif %}{% endfor %}"
    "{% for message in messages %}"
    f"{{% if {_NOT_FIRST_SYSTEM} %}}"
    + _PLAIN_TURN
    + "{% elif message.role == 'assistant' %}{% set reasoning, content = '', message.content %}"
    "{% if '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > last.question and (loop.last or reasoning) %}"
    "{{ '<think>\n' + reasoning + '\n</think>\n\n' }}{% set content = content.lstrip('\n') %}{% endif %}"
    "{{ content + '<|im_end|>\n' }}"
    + _ANSWERS
    + "{% endif %}{% endfor %}"
    + _OPENING.replace(
        "{% endif %}", "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
    )
)

# Other special tokens, content without white space around it, answers of tools as JSON under another role.
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\n\n' }}"
    "{% if message.role == 'tool' %}{{ message.content | tojson }}{% else %}{{ message.content | trim }}{% endif %}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def make_tokenizer(template: str, words: Sequence[str] = (), end: str | None = None) -> PreTrainedTokenizerFast:
    """One token per byte, except for special tokens and ``words``, each of which is merged from left to right."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(dict.fromkeys((word[:i], word[i]) for word in words for i in range(1, len(word))))
    pieces = dict.fromkeys([*alphabet, *(left + right for left, right in merges)])
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = _LLAMA_TOKENS if template is LLAMA3 else _CHATML_TOKENS
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        bos_token=special[0],
        eos_token=end or special[-1],
        clean_up_tokenization_spaces=False,
    )
