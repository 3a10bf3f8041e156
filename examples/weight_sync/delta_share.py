"""How much of a policy ``disk_delta`` carries after real optimizer steps.

    python examples/weight_sync/delta_share.py [--model DIRECTORY] [--steps 10] [--learning-rate 1e-6]

A policy gradient of random answers, AdamW on float32 weights, bfloat16 published after every step. A receiver applies each
delta and verifies the result. Without ``--model`` the policy is a random Qwen3 of 71 million weights: its weights and
gradients are not those of a trained model, so give your own where the number matters.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from weight_sync import local_shards, open_receiver, open_sender

SEQUENCES, TOKENS = 4, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face directory; default: a random Qwen3")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options.model) if options.model else random_qwen3()
    model.float()
    print("step  weights changed  bytes on the wire  of the full size")
    for step, (changed, wire, total) in enumerate(published_steps(model, options.steps, options.learning_rate), 1):
        print(f"{step:4}  {changed:14.2%}  {wire / 1e6:14.2f} MB  {wire / total:16.2%}")


def published_steps(model: PreTrainedModel, steps: int, learning_rate: float) -> Iterator[tuple[float, int, int]]:
    """After each step: share of the bfloat16 weights that changed, bytes of the delta, bytes of the whole policy."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    with tempfile.TemporaryDirectory(prefix="delta-share-") as url:
        sender = open_sender("disk_delta", run_id="delta-share", url=url, full_every=steps + 1, fsync=False)
        receiver = open_receiver("disk_delta")
        before = receiver.receive(sender.publish(0, shards_of(model))).tensors
        for version in range(1, steps + 1):
            policy_gradient(model).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            received = receiver.receive(sender.publish(version, shards_of(model)))
            after = received.tensors
            changed = sum(int((after[name] != before[name]).sum()) for name in after)
            yield (
                changed / sum(map(torch.numel, after.values())),
                sender.stats["wire_bytes"],
                received.manifest.total_bytes,
            )
            before = after
        receiver.close()
        sender.close()


def policy_gradient(model: PreTrainedModel) -> torch.Tensor:
    """The loss of random answers, half of them good and half of them bad."""
    ids = torch.randint(0, model.config.vocab_size, (SEQUENCES, TOKENS))
    advantages = torch.tensor([1.0, -1.0]).repeat(SEQUENCES // 2)
    logprobs = torch.log_softmax(model(ids).logits[:, :-1], -1).gather(2, ids[:, 1:, None]).squeeze(2)
    return -(advantages[:, None] * logprobs).mean()


def shards_of(model: PreTrainedModel) -> list:
    return [shard for name, p in model.named_parameters() for shard in local_shards(name, p.detach(), torch.bfloat16)]


def random_qwen3() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


if __name__ == "__main__":
    main()
