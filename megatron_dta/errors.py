"""The one exception that the command line reports without a traceback."""


class UsageError(ValueError):
    """Bad input from the user: the message names the bad value, the valid ones and the remedy, in one line."""
