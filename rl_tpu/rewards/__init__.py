"""Rewards: functions that score one sample, and the worker processes that run them."""

from rl_tpu.rewards.registry import find_reward
from rl_tpu.rewards.service import RewardService, RewardStats

__all__ = ["RewardService", "RewardStats", "find_reward"]
