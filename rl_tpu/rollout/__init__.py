"""Rollout: SGLang engines that write answers, and the fleet that spreads requests and new policies over them."""
