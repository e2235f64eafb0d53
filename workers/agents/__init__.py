"""Agents: attempts at the tasks of an environment, the gateway to the policy's tokens, and trajectories."""
