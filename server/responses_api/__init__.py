"""OpenAI's Responses API over the chat of this server: types, translation, answers, store."""
