"""A driver whose worker hangs: prints the worker's pid, then waits to be killed."""

import asyncio

from rl_tpu.config.schema import RewardConfig
from rl_tpu.rewards import RewardService
from rl_tpu.types import Prompt, Sample


async def main() -> None:
    service = RewardService(RewardConfig(name="faulty_rewards:by_text", timeout_s=600))
    prompt = Prompt("p", (1,), None)
    sample = Sample([1], [1], [1], [0.0], [], "stop", text="pid")
    await service.score(prompt, [sample])
    print(int(sample.reward), flush=True)
    sample.text = "hang in C"
    await service.score(prompt, [sample])


if __name__ == "__main__":
    asyncio.run(main())
