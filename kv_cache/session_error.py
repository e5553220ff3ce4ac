"""Why a session cannot be saved or restored, in words for the one who asked for it."""


class SessionError(Exception):
    """The message names the session and says what to do or what does not fit."""
