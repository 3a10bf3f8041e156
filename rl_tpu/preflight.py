"""`python -m rl_tpu.preflight +experiment=qwen3_4b_dapo`: whether a run compiles, fits and finds its machine."""


def main() -> None:
    """See `rl_tpu.orchestrator.preflight.command`, imported here because worker processes import this file too."""
    from rl_tpu.orchestrator.preflight.command import preflight

    preflight()


if __name__ == "__main__":
    main()
