"""`python -m rl_tpu.train +experiment=quickstart`: train a policy. Sweeps: `-m seed=0,1`."""


def main() -> None:
    """See `rl_tpu.orchestrator.command.train`, which is imported here because reward workers import this file too."""
    from rl_tpu.orchestrator.command import train

    train()


if __name__ == "__main__":
    main()
