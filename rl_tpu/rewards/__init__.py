"""Rewards: functions that score what a policy wrote, and the worker processes that run them."""

from rl_tpu.rewards.plan import make_plan
from rl_tpu.rewards.registry import Response, find_reward, takes_group, takes_response
from rl_tpu.rewards.service import RewardService, RewardStats

__all__ = ["Response", "RewardService", "RewardStats", "find_reward", "make_plan", "takes_group", "takes_response"]
