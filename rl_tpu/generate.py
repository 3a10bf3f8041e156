"""`python -m rl_tpu.generate +experiment=quickstart trainer.steps=3`: write and score a run's answers without training."""


def main() -> None:
    """See `rl_tpu.orchestrator.generate_command`, which is imported here because reward workers import this file too."""
    from rl_tpu.orchestrator.generate_command import generate

    generate()


if __name__ == "__main__":
    main()
