"""Anthropic's Messages API over the chat of this server: types, translation, answers."""
