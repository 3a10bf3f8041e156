"""Agents that speak the OpenAI API, trained unchanged: an HTTP endpoint that records what the policy writes."""
