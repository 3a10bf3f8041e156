"""`python -m rl_tpu.export checkpoint=runs/.../checkpoints/step-000010 out=DIR`: a checkpoint as a Hugging Face directory."""


def main() -> None:
    """See `rl_tpu.orchestrator.export_command`."""
    from rl_tpu.orchestrator import export_command

    export_command.main()


if __name__ == "__main__":
    main()
