"""How a command says that it cannot do what was asked of it."""


class Refused(Exception):
    """A setting, a path or a machine that does not fit. One sentence that says what to do; printed on stderr, exit code 2."""
