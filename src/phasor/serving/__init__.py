"""Serving: HTTP in front of the engine, over the interface of OpenAI's clients."""
