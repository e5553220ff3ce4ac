"""The one error for settings that cannot be obeyed, as opposed to checkpoints that are bad.

Who started the server is told which setting it is; a supervisor sees it in the exit code.
"""


class SettingError(ValueError):
    """A setting that is wrong by itself, on this machine or for this model; one line."""
