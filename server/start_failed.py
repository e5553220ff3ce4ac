"""Why a server cannot start: one line for the operator, and whether a setting is the reason."""

import contextlib
from collections.abc import Iterator

from ..configs.setting_error import SettingError


class StartFailed(Exception):
    """The server cannot start; the text is one line for the operator.

    is_setting: what is wrong is a setting, not the checkpoint or the machine.
    """

    def __init__(self, message: str, is_setting: bool = False) -> None:
        super().__init__(message)
        self.is_setting = is_setting


@contextlib.contextmanager
def refusing(is_setting: bool = False) -> Iterator[None]:
    """A ValueError within is why the start fails; is_setting: whatever its kind."""
    try:
        yield
    except ValueError as error:
        raise StartFailed(str(error), is_setting or isinstance(error, SettingError)) from None
