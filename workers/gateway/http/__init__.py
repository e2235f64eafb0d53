"""The gateway over HTTP: OpenAI's and Anthropic's protocols around the same sampler of turns."""
