"""What the tests of prompt sources share: writing files and loading them."""

import json

from rl_tpu.config.schema import PromptSourceConfig
from rl_tpu.data import load_prompts


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load_source(tokenizer, *, max_prompt_tokens=2000, too_long="skip", elsewhere=None, **options):
    config = PromptSourceConfig(**{"kind": "file", **options})
    return load_prompts(config, tokenizer, max_prompt_tokens=max_prompt_tokens, too_long=too_long, elsewhere=elsewhere)


def answers(found):
    return [prompt.answer for prompt in found.prompts]
