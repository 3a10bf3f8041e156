"""`python -m rl_tpu.evaluate +experiment=quickstart checkpoint=runs/.../final`: score a Hugging Face directory."""


def main() -> None:
    """See `rl_tpu.orchestrator.evaluate_command`, which is imported here because reward workers import this file too."""
    from rl_tpu.orchestrator.evaluate_command import evaluate_checkpoint

    evaluate_checkpoint()


if __name__ == "__main__":
    main()
