"""The end of a program by a signal, and what a training keeps then."""


class Stopped(BaseException):
    """The user or the system wants the program to end. Not an ``Exception``: nothing on the way may swallow it. Its
    text, if it has one, says what is kept."""
