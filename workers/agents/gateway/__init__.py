"""The only access to the policy's tokens, for environments in this process and for agents over HTTP."""
